#include "godwit/base/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

namespace godwit {
namespace {

TEST(ParallelFor, CoversEveryIndexOnce) {
  for (const int threads : {1, 2, 5}) {
    set_num_threads(threads);
    for (const int64_t n : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> seen(n);
      parallel_for(0, n, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) seen[i]++;
      });
      for (auto& count : seen) EXPECT_EQ(count.load(), 1);
    }
  }
}

TEST(ParallelFor, RethrowsAndNests) {
  set_num_threads(4);
  EXPECT_THROW(parallel_for(0, 100, 1,
                            [](int64_t begin, int64_t) {
                              if (begin > 0) throw std::runtime_error("x");
                            }),
               std::runtime_error);
  std::atomic<int> sum{0};
  parallel_for(0, 8, 1, [&](int64_t b, int64_t e) {
    for (int64_t i = b; i < e; ++i)
      parallel_for(0, 8, 1, [&](int64_t b2, int64_t e2) { sum += static_cast<int>(e2 - b2); });
  });
  EXPECT_EQ(sum.load(), 64);
}

TEST(AwakeThreads, LoopsCoverEveryIndexAndRunTogether) {
  for (const int threads : {1, 2, 5}) {
    set_num_threads(threads);
    std::vector<int64_t> sum(1000, 0);
    const auto caller = std::this_thread::get_id();
    with_awake_threads([&] {
      EXPECT_EQ(std::this_thread::get_id(), caller);
      EXPECT_EQ(num_threads(), threads);
      for (int64_t loop = 0; loop < 2000; ++loop) {
        const int64_t n = loop % 1000;
        parallel_for(0, n, 1 + loop % 50, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) ++sum[i];
        });
      }
    });
    for (int64_t i = 0; i < 1000; ++i) EXPECT_EQ(sum[i], 2 * (999 - i)) << i;
  }
}

TEST(AwakeThreads, RethrowsAndNests) {
  set_num_threads(3);
  std::atomic<int> sum{0};
  EXPECT_THROW(with_awake_threads([&] {
                 with_awake_threads([&] {
                   parallel_for(0, 8, 1, [&](int64_t b, int64_t e) {
                     for (int64_t i = b; i < e; ++i)
                       parallel_for(0, 8, 1,
                                    [&](int64_t b2, int64_t e2) { sum += static_cast<int>(e2 - b2); });
                   });
                 });
                 parallel_for(0, 100, 1, [](int64_t begin, int64_t) {
                   if (begin > 0) throw std::runtime_error("x");
                 });
               }),
               std::runtime_error);
  EXPECT_EQ(sum.load(), 64);
  parallel_for(0, 8, 1,
               [&](int64_t b, int64_t e) { sum += static_cast<int>(e - b); });  // the pool still works
  EXPECT_EQ(sum.load(), 72);
}

}  // namespace
}  // namespace godwit
