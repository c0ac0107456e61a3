// Progress of a long loop on stderr: one line redrawn in place on a terminal, a plain line every now and then
// otherwise (a log file, a pipe).
//   stage0 256 [=======>            ] 120/300 40% 2.1/s ETA 1:25 loss 3.211
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>

namespace godwit {

struct ProgressOptions {
  std::string label;
  int64_t total = 0;
  int64_t done = 0;  // at the start, of a loop that is resumed
  // For tests: where to write, whether it is a terminal and how wide, seconds on a clock.
  std::FILE* stream = stderr;
  std::optional<int> columns = {};  // 0 = not a terminal; absent = ask the stream
  std::function<double()> now = {};
};

class ProgressBar {
 public:
  explicit ProgressBar(ProgressOptions options);

  // `done` of the total are done; `text` is shown behind the numbers. Draws at most ten times a second on a
  // terminal, otherwise a line at the first call and then every ten seconds.
  void update(int64_t done, const std::string& text);

  // Draws the last state and ends the line. Without it the destructor only ends a drawn line.
  void finish();
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

 private:
  void draw();
  std::string line() const;

  ProgressOptions options_;
  int columns_ = 0;
  double started_ = 0, drawn_ = 0;
  int64_t done_ = 0, drawn_done_ = -1;
  std::string text_;
  bool open_ = false;  // a line is drawn and not ended
};

}  // namespace godwit
