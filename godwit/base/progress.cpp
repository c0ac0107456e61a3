#include "godwit/base/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>

namespace godwit {
namespace {

constexpr double kRedraw = 0.1, kPlainLine = 10;  // seconds
constexpr int kBarWidth = 20;

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Columns of a terminal, 0 for anything else.
int terminal_columns(std::FILE* stream) {
  const int fd = fileno(stream);
  if (fd < 0 || !isatty(fd)) return 0;
  winsize size{};
  return ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

std::string clock_text(double seconds) {
  const auto s = static_cast<int64_t>(std::llround(seconds));
  if (s >= 3600) return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
  return fmt::format("{}:{:02}", s / 60, s % 60);
}

}  // namespace

ProgressBar::ProgressBar(ProgressOptions options) : options_(std::move(options)), done_(options_.done) {
  if (!options_.now) options_.now = steady_seconds;
  columns_ = options_.columns.value_or(terminal_columns(options_.stream));
  started_ = options_.now();
}

void ProgressBar::update(int64_t done, const std::string& text) {
  done_ = done;
  text_ = text;
  const bool first = drawn_done_ < 0;
  if (first || options_.now() - drawn_ >= (columns_ > 0 ? kRedraw : kPlainLine)) draw();
}

void ProgressBar::finish() {
  if (drawn_done_ != done_) draw();
  if (open_) std::fputc('\n', options_.stream);
  open_ = false;
  std::fflush(options_.stream);
}

ProgressBar::~ProgressBar() {
  if (open_) std::fputc('\n', options_.stream);
}

void ProgressBar::draw() {
  drawn_ = options_.now();
  drawn_done_ = done_;
  std::string text = line();
  if (columns_ > 0) {
    text.resize(std::min(text.size(), static_cast<size_t>(std::max(1, columns_ - 1))));
    fmt::print(options_.stream, "\r\x1b[K{}", text);  // back to column 0, clear to the end
    open_ = true;
  } else {
    fmt::print(options_.stream, "{}\n", text);
  }
  std::fflush(options_.stream);
}

std::string ProgressBar::line() const {
  const double share =
      options_.total > 0
          ? std::clamp(static_cast<double>(done_) / static_cast<double>(options_.total), 0.0, 1.0)
          : 0;
  std::string out = options_.label;
  if (columns_ > 0) {
    const int filled = static_cast<int>(share * kBarWidth);
    std::string bar(filled, '=');
    if (filled < kBarWidth) bar += '>';
    bar.resize(kBarWidth, ' ');
    out += fmt::format(" [{}]", bar);
  }
  out += fmt::format(" {}/{} {:.0f}%", done_, options_.total, std::floor(share * 100));
  const double seconds = options_.now() - started_;
  const auto advanced = static_cast<double>(done_ - options_.done);
  if (seconds > 0 && advanced > 0) {
    const double rate = advanced / seconds;
    out += rate >= 1 ? fmt::format(" {:.1f}/s", rate) : fmt::format(" {:.1f} s each", 1 / rate);
    out += done_ < options_.total
               ? fmt::format(" ETA {}", clock_text(static_cast<double>(options_.total - done_) / rate))
               : fmt::format(" in {}", clock_text(seconds));
  }
  if (!text_.empty()) out += " " + text_;
  return out;
}

}  // namespace godwit
