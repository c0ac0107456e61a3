// The kernels' parallel_for runs on ATen's pool, and really on several threads.
#include "godwit/base/parallel.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <mutex>
#include <set>
#include <thread>

namespace godwit {
namespace {

TEST(ParallelForOps, UsesTheThreadsOfAten) {
  const int before = at::get_num_threads();
  at::set_num_threads(3);
  EXPECT_EQ(num_threads(), 3);
  std::mutex mutex;
  std::set<std::thread::id> ids;
  parallel_for(0, 3, 1, [&](int64_t begin, int64_t end) {
    const std::lock_guard lock(mutex);
    EXPECT_EQ(end - begin, 1);
    ids.insert(std::this_thread::get_id());
  });
  at::set_num_threads(before);
  EXPECT_EQ(ids.size(), 3u);
}

}  // namespace
}  // namespace godwit
