// Charts as inline SVG: lines over a linear or logarithmic plane, and maps of coloured cells. Colours are
// classes (c0, c1, ... for series, q0 ... q8 for cells), so that the page's style sheet serves light and
// dark.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace godwit::report {

struct Point {
  double x = 0, y = 0;
};

struct Series {
  std::string name;                // in the legend; empty: not there
  int colour = 0;                  // c0 ... c7
  std::vector<Point> points = {};  // a y that is not finite breaks the line
  bool faint = false;              // behind the others: raw values of a smoothed line
  bool dots = false;               // marks instead of a line
  bool dashed = false;
  double strength = 1.0;  // opacity: curves of one series through time
};

struct Mark {  // a vertical line with a label at the top
  double x = 0;
  std::string label;
};

struct Flag {  // a sign at a point, with a tooltip
  double x = 0, y = 0;
  bool good = true;
  std::string text;
};

struct Chart {
  std::string title, x_label, y_label;
  bool log_x = false, log_y = false;
  bool whole_x = false;  // ticks at whole numbers only: layers, steps
  std::vector<Series> series = {};
  std::vector<Mark> marks = {};
  std::vector<Flag> flags = {};
};

// <figure> with the title, the legend and the SVG. Nothing to show: a line that says so (`empty`).
std::string render(const Chart& chart, std::string_view empty);

// Rows of cells, each of a level 0 ... 8 (-1: nothing there).
struct Map {
  std::string title, x_label, y_label;
  std::vector<std::string> row_names = {};
  std::vector<std::vector<int>> levels = {};  // [row][column]
  std::vector<std::string> level_names = {};  // [9], for the legend; empty: not there
  std::vector<std::string> row_notes = {};    // at the right of a row; empty: none
  double x_begin = 0, x_end = 0;              // what the columns span, for the axis
};
std::string render(const Map& map, std::string_view empty);

// Text for HTML and SVG.
std::string escape(std::string_view text);

// 0.00123, 1.5K, 32K.
std::string short_number(double value);

// At most `most` points: of each stretch the smallest and the largest value stay.
std::vector<Point> thin(const std::vector<Point>& points, size_t most);

// Exponential mean with a horizon of `steps` points, over the finite values.
std::vector<Point> smooth(const std::vector<Point>& points, double steps);

}  // namespace godwit::report
