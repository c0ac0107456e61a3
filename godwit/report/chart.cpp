#include "godwit/report/chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace godwit::report {
namespace {

// The drawing, in its own units; the page scales it.
constexpr double kWidth = 560, kHeight = 300;
constexpr double kLeft = 56, kRight = 14, kTop = 22, kBottom = 42;

// One axis: values to places, and where to put ticks.
struct Axis {
  double low = 0, high = 1;  // values, or their logarithms
  bool log = false;
  double from = 0, to = 1;  // places

  double place(double value) const {
    const double v = log ? std::log10(value) : value;
    return from + (to - from) * (v - low) / (high - low);
  }
  bool shows(double value) const { return std::isfinite(value) && (!log || value > 0); }
};

Axis make_axis(const std::vector<double>& values, bool log, double from, double to, double margin) {
  Axis axis{.log = log, .from = from, .to = to};
  double low = std::numeric_limits<double>::infinity(), high = -low;
  for (const double value : values) {
    if (!axis.shows(value)) continue;
    const double v = log ? std::log10(value) : value;
    low = std::min(low, v);
    high = std::max(high, v);
  }
  if (!(low <= high)) return axis;
  if (high - low < 1e-12) low -= log ? 0.5 : std::max(0.5, std::abs(low) * 0.1), high = high + (high - low);
  const double pad = (high - low) * margin;
  axis.low = low - pad;
  axis.high = high + pad;
  return axis;
}

std::vector<double> ticks(const Axis& axis, bool whole = false) {
  std::vector<double> out;
  if (axis.log) {
    const double span = axis.high - axis.low;
    const std::vector<double> inside = span > 4     ? std::vector<double>{1}
                                       : span > 1.2 ? std::vector<double>{1, 3}
                                                    : std::vector<double>{1, 2, 3, 5, 7};
    const double stride = std::max(1.0, std::ceil(span / 6));
    for (double decade = std::floor(axis.low); decade <= axis.high; decade += stride)
      for (const double m : inside) {
        const double v = decade + std::log10(m);
        if (v >= axis.low && v <= axis.high) out.push_back(std::pow(10.0, v));
      }
    if (out.size() >= 2) return out;
    out.clear();
  }
  const double low = axis.log ? std::pow(10, axis.low) : axis.low,
               high = axis.log ? std::pow(10, axis.high) : axis.high;
  const double rough = (high - low) / 5, power = std::pow(10, std::floor(std::log10(rough)));
  const double unit = rough / power < 1.5 ? 1 : rough / power < 3.5 ? 2 : rough / power < 7.5 ? 5 : 10;
  const double step = whole ? std::max(1.0, unit * power) : unit * power;
  for (double v = std::ceil(low / step) * step; v <= high + step * 1e-9; v += step)
    out.push_back(std::abs(v) < step * 1e-9 ? 0 : v);
  return out;
}

std::string text(double x, double y, const char* cls, std::string_view content) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" class=\"{}\">{}</text>", x, y, cls, escape(content));
}

std::string line(double x1, double y1, double x2, double y2, const char* cls) {
  return fmt::format("<path class=\"{}\" d=\"M{:.1f} {:.1f}L{:.1f} {:.1f}\"/>", cls, x1, y1, x2, y2);
}

std::string frame(const Chart& chart, const Axis& x, const Axis& y) {
  std::string out;
  for (const double v : ticks(y)) {
    const double at = y.place(v);
    out +=
        line(kLeft, at, kWidth - kRight, at, "grid") + text(kLeft - 6, at + 4, "tick end", short_number(v));
  }
  double free_from = 0;  // labels must not run into each other
  for (const double v : ticks(x, chart.whole_x)) {
    const double at = x.place(v);
    out += line(at, kHeight - kBottom, at, kHeight - kBottom + 4, "axis");
    const std::string label = short_number(v);
    if (at - 4.0 * static_cast<double>(label.size()) < free_from) continue;
    free_from = at + 4.0 * static_cast<double>(label.size()) + 6;
    out += text(at, kHeight - kBottom + 17, "tick middle", label);
  }
  out += line(kLeft, kHeight - kBottom, kWidth - kRight, kHeight - kBottom, "axis");
  out += text((kLeft + kWidth - kRight) / 2, kHeight - 6, "label middle", chart.x_label);
  out += text(kLeft, 12, "label", chart.y_label);
  return out;
}

std::string draw(const Series& series, const Axis& x, const Axis& y) {
  std::string d, dots;
  bool pen = false;
  for (const Point& p : series.points) {
    if (!x.shows(p.x) || !y.shows(p.y)) {
      pen = false;
      continue;
    }
    const double px = x.place(p.x), py = y.place(p.y);
    if (series.dots)
      dots += fmt::format(
          "<circle class=\"dot c{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.5\"><title>{}: "
          "{:.4g}</title></circle>",
          series.colour, px, py, escape(series.name), p.y);
    else
      d += fmt::format("{}{:.1f} {:.1f}", pen ? "L" : "M", px, py);
    pen = true;
  }
  if (series.dots) return dots;
  if (d.find('L') == std::string::npos && !d.empty()) d += "h0.1";  // a single point
  return fmt::format("<path class=\"line c{}{}{}\" style=\"opacity:{:.2f}\" d=\"{}\"/>", series.colour,
                     series.faint ? " faint" : "", series.dashed ? " dashed" : "",
                     series.faint ? 0.3 : series.strength, d);
}

// Labels go to the right of their line, to the left where the drawing ends, and down a row where another is.
std::string draw_marks(const std::vector<Mark>& marks, const Axis& x) {
  std::string out;
  std::vector<double> free_from(4, 0);
  for (const Mark& m : marks) {
    const double at = x.place(m.x), length = 7.5 * static_cast<double>(m.label.size()) + 8;
    out += line(at, kTop, at, kHeight - kBottom, "mark");
    const bool left = at + 10.5 * static_cast<double>(m.label.size()) > kWidth;
    const double begin = left ? at - length : at;
    for (size_t row = 0; row < free_from.size(); ++row) {
      if (begin < free_from[row]) continue;
      out += text(left ? at - 4 : at + 4, kTop + 11 + 15 * static_cast<double>(row),
                  left ? "mark-label end" : "mark-label", m.label);
      free_from[row] = begin + length;
      break;
    }
  }
  return out;
}

std::string legend(const std::vector<Series>& series) {
  std::string out;
  for (const Series& s : series) {
    if (s.name.empty()) continue;
    out += fmt::format("<span><i class=\"key b{}{}\" style=\"opacity:{:.2f}\"></i>{}</span>", s.colour,
                       s.dots ? " round" : "", s.strength, escape(s.name));
  }
  return out.empty() ? out : "<div class=\"legend\">" + out + "</div>";
}

std::string figure(std::string_view title, const std::string& inside) {
  return fmt::format("<figure><figcaption>{}</figcaption>{}</figure>\n", escape(title), inside);
}

}  // namespace

std::string escape(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += static_cast<unsigned char>(c) < 0x20 && c != '\n' ? ' ' : c;
    }
  }
  return out;
}

std::string short_number(double value) {
  const double size = std::abs(value);
  if (size >= 1e15 || (size > 0 && size < 1e-3)) return fmt::format("{:.3g}", value);
  if (size >= 1e9) return fmt::format("{:.3g}B", value / 1e9);
  if (size >= 1e6) return fmt::format("{:.3g}M", value / 1e6);
  if (size >= 1e4) return fmt::format("{:.3g}K", value / 1e3);
  return fmt::format("{:.4g}", value);
}

std::vector<Point> thin(const std::vector<Point>& points, size_t most) {
  if (points.size() <= most) return points;
  const size_t stretches = std::max<size_t>(1, most / 2);
  std::vector<Point> out;
  for (size_t s = 0; s < stretches; ++s) {
    const size_t begin = points.size() * s / stretches, end = points.size() * (s + 1) / stretches;
    const auto by_y = [](const Point& a, const Point& b) {
      return !(std::isfinite(b.y)) ? false : !(std::isfinite(a.y)) || a.y < b.y;
    };
    const auto first = points.begin() + static_cast<int64_t>(begin),
               last = points.begin() + static_cast<int64_t>(end);
    auto [low, high] = std::minmax_element(first, last, by_y);
    if (high < low) std::swap(low, high);
    out.push_back(*low);
    if (low != high) out.push_back(*high);
  }
  return out;
}

std::vector<Point> smooth(const std::vector<Point>& points, double steps) {
  std::vector<Point> out;
  double mean = 0, weight = 0;
  const double keep = 1 - 1 / std::max(1.0, steps);
  for (const Point& p : points) {
    if (!std::isfinite(p.y)) {
      out.push_back(p);
      continue;
    }
    mean = keep * mean + (1 - keep) * p.y;
    weight = keep * weight + (1 - keep);
    out.push_back({p.x, weight > 0 ? mean / weight : p.y});
  }
  return out;
}

std::string render(const Chart& chart, std::string_view empty) {
  std::vector<double> xs, ys;
  for (const Series& s : chart.series) {
    for (const Point& p : s.points) {
      if (!std::isfinite(p.y) || (chart.log_y && p.y <= 0)) continue;
      xs.push_back(p.x);
      ys.push_back(p.y);
    }
  }
  if (ys.empty()) return figure(chart.title, fmt::format("<p class=\"none\">{}</p>", escape(empty)));
  for (const Mark& m : chart.marks) xs.push_back(m.x);
  const Axis x = make_axis(xs, chart.log_x, kLeft, kWidth - kRight, 0);
  const Axis y = make_axis(ys, chart.log_y, kHeight - kBottom, kTop, 0.05);
  std::string svg = fmt::format("<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">", kWidth, kHeight,
                                escape(chart.title));
  svg += frame(chart, x, y);
  svg += draw_marks(chart.marks, x);
  for (const Series& s : chart.series) svg += draw(s, x, y);
  for (const Flag& f : chart.flags) {
    const double px = x.place(f.x),
                 py = y.shows(f.y) ? std::clamp(y.place(f.y), kTop, kHeight - kBottom) : kTop + 20;
    svg +=
        fmt::format("<path class=\"flag {}\" d=\"M{:.1f} {:.1f}l6 6l-6 6l-6 -6z\"><title>{}</title></path>",
                    f.good ? "good" : "bad", px, py - 6, escape(f.text));
  }
  return figure(chart.title, legend(chart.series) + svg + "</svg>");
}

std::string render(const Map& map, std::string_view empty) {
  size_t columns = 0;
  for (const auto& row : map.levels) columns = std::max(columns, row.size());
  if (columns == 0) return figure(map.title, fmt::format("<p class=\"none\">{}</p>", escape(empty)));
  const bool notes = !map.row_notes.empty();
  const double row_height = std::clamp(220.0 / static_cast<double>(map.levels.size()), 4.0, 26.0);
  const double right = notes ? 84 : kRight, wide = (kWidth - kLeft - right) / static_cast<double>(columns);
  const double bottom = kTop + row_height * static_cast<double>(map.levels.size());
  std::string svg = fmt::format("<svg viewBox=\"0 0 {} {:.0f}\" role=\"img\" aria-label=\"{}\">", kWidth,
                                bottom + 40, escape(map.title));
  svg += text(kLeft, 12, "label", map.y_label);
  double free_from = 0;
  for (size_t r = 0; r < map.levels.size(); ++r) {
    const double top = kTop + row_height * static_cast<double>(r), middle = top + row_height / 2 + 4;
    if (middle >= free_from) {
      svg += text(kLeft - 6, middle, "tick end", map.row_names[r]);
      if (notes) svg += text(kWidth - right + 6, middle, "tick", map.row_notes[r]);
      free_from = middle + 13;
    }
    std::vector<std::string> paths(9);  // neighbours of one level are one rectangle
    for (size_t c = 0; c < map.levels[r].size();) {
      size_t end = c + 1;
      while (end < map.levels[r].size() && map.levels[r][end] == map.levels[r][c]) ++end;
      if (map.levels[r][c] >= 0)
        paths[map.levels[r][c]] += fmt::format(
            "M{:.2f} {:.1f}h{:.2f}v{:.1f}h-{:.2f}z", kLeft + wide * static_cast<double>(c), top,
            wide * static_cast<double>(end - c), row_height - 1, wide * static_cast<double>(end - c));
      c = end;
    }
    for (size_t level = 0; level < paths.size(); ++level)
      if (!paths[level].empty()) svg += fmt::format("<path class=\"q{}\" d=\"{}\"/>", level, paths[level]);
  }
  const Axis x{.low = map.x_begin, .high = map.x_end, .log = false, .from = kLeft, .to = kWidth - right};
  for (const double v : ticks(x, /*whole=*/true))
    svg += text(x.place(v), bottom + 15, "tick middle", short_number(v));
  svg += text((kLeft + kWidth - right) / 2, bottom + 33, "label middle", map.x_label) + "</svg>";
  std::string key;
  for (size_t i = 0; i < map.level_names.size(); ++i)
    if (!map.level_names[i].empty())
      key += fmt::format("<span><i class=\"key q{}\"></i>{}</span>", i, escape(map.level_names[i]));
  return figure(map.title, (key.empty() ? "" : "<div class=\"legend\">" + key + "</div>") + svg);
}

}  // namespace godwit::report
