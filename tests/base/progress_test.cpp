#include "godwit/base/progress.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace godwit {
namespace {

// A stream in memory and a clock that the test moves.
struct Recorder {
  char* data = nullptr;
  size_t size = 0;
  std::FILE* stream = open_memstream(&data, &size);
  double time = 100;

  ~Recorder() {
    std::fclose(stream);
    std::free(data);
  }
  ProgressOptions options(int columns) {
    return {
        .label = "train", .total = 100, .stream = stream, .columns = columns, .now = [this] { return time; }};
  }
  std::string text() {
    std::fflush(stream);
    return {data, size};
  }
};

TEST(ProgressBar, RedrawsOneLineOnATerminal) {
  Recorder r;
  {
    ProgressBar bar(r.options(80));
    r.time += 1;
    bar.update(10, "loss 3.5");
    EXPECT_EQ(r.text(), "\r\x1b[Ktrain [==>                 ] 10/100 10% 10.0/s ETA 0:09 loss 3.5");
    r.time += 0.05;
    bar.update(11, "loss 3.4");  // too soon
    EXPECT_EQ(r.text().find("11/100"), std::string::npos);
    r.time += 98.95;
    bar.update(100, "loss 2.0");
    bar.finish();
  }
  EXPECT_TRUE(
      r.text().ends_with("\r\x1b[Ktrain [====================] 100/100 100% 1.0/s in 1:40 loss 2.0\n"))
      << r.text();
}

TEST(ProgressBar, CutsTheLineAtTheTerminalsWidth) {
  Recorder r;
  ProgressBar bar(r.options(12));
  bar.update(1, "long text");
  EXPECT_EQ(r.text(), "\r\x1b[Ktrain [>   ");
}

TEST(ProgressBar, PrintsALineEveryTenSecondsOtherwise) {
  Recorder r;
  ProgressBar bar(r.options(0));
  for (int i = 1; i <= 25; ++i) {
    r.time += 1;
    bar.update(i, "x");
  }
  bar.finish();
  EXPECT_EQ(r.text(),
            "train 1/100 1% 1.0/s ETA 1:39 x\n"
            "train 11/100 11% 1.0/s ETA 1:29 x\n"
            "train 21/100 21% 1.0/s ETA 1:19 x\n"
            "train 25/100 25% 1.0/s ETA 1:15 x\n");
}

TEST(ProgressBar, AResumedLoopCountsOnlyItsOwnSteps) {
  Recorder r;
  ProgressOptions options = r.options(0);
  options.done = 90;
  ProgressBar bar(options);
  r.time += 7200;
  bar.update(91, "");
  EXPECT_EQ(r.text(), "train 91/100 91% 7200.0 s each ETA 18:00:00\n");
}

TEST(ProgressBar, AnEmptyLoopHasNoRate) {
  Recorder r;
  ProgressOptions options = r.options(0);
  options.total = 0;
  ProgressBar bar(options);
  bar.finish();
  EXPECT_EQ(r.text(), "train 0/0 0%\n");
}

}  // namespace
}  // namespace godwit
