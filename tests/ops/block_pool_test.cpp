// The pool of large blocks: what is freed comes again, and the system never gives more than was in use at
// once.
#include "godwit/ops/block_pool.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <thread>
#include <vector>

namespace godwit::ops {
namespace {

constexpr size_t kMiB = 1 << 20;

TEST(BlockPool, AFreedBlockComesAgain) {
  const void* first = nullptr;
  {
    const c10::DataPtr block = block_pool().allocate(40 * kMiB);
    first = block.get();
    std::memset(block.get(), 1, 40 * kMiB);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % 64, 0u);
  }
  const BlockPoolUse before = block_pool_use();
  const c10::DataPtr again = block_pool().allocate(39 * kMiB);  // a little less fits
  EXPECT_EQ(again.get(), first);
  const c10::DataPtr other = block_pool().allocate(39 * kMiB);  // in use: another one
  EXPECT_NE(other.get(), first);
  const BlockPoolUse after = block_pool_use();
  EXPECT_EQ(after.reused, before.reused + 1);
  EXPECT_EQ(after.taken, before.taken + 1);
}

TEST(BlockPool, SmallBlocksAreNotItsOwn) {
  const BlockPoolUse before = block_pool_use();
  for (const size_t size : {size_t{0}, size_t{1}, kMiB - 1}) {
    const c10::DataPtr block = block_pool().allocate(size);
    if (size > 0) std::memset(block.get(), 7, size);
  }
  const BlockPoolUse after = block_pool_use();
  EXPECT_EQ(after.taken, before.taken);
  EXPECT_EQ(after.live, before.live);
}

TEST(BlockPool, NeverHoldsMoreThanWasInUseAtOnce) {
  std::mt19937 random(3);
  std::vector<c10::DataPtr> held;
  int64_t most = block_pool_use().live + block_pool_use().kept;
  for (int i = 0; i < 2000; ++i) {
    if (held.size() < 20 && random() % 2 == 0) {
      held.push_back(block_pool().allocate(kMiB + random() % (16 * kMiB)));
      static_cast<char*>(held.back().get())[0] = 1;
    } else if (!held.empty()) {
      std::swap(held[random() % held.size()], held.back());
      held.pop_back();
    }
    const BlockPoolUse use = block_pool_use();
    most = std::max(most, use.live);
    ASSERT_LE(use.live + use.kept, most) << i;
  }
  held.clear();
  EXPECT_EQ(block_pool_use().live, 0);
  EXPECT_GT(block_pool_use().reused, 10);
}

TEST(BlockPool, ManyThreads) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < 200; ++i) {
        const size_t size = kMiB * (1 + (i + t) % 5);
        const c10::DataPtr block = block_pool().allocate(size);
        auto* bytes = static_cast<unsigned char*>(block.get());
        bytes[0] = bytes[size - 1] = static_cast<unsigned char>(t);
        EXPECT_EQ(bytes[0], t);
        EXPECT_EQ(bytes[size - 1], t);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(block_pool_use().live, 0);
}

// More than there is: an error that a caller can answer, and the pool goes on.
TEST(BlockPool, TooMuchIsAnError) {
  EXPECT_ANY_THROW(block_pool().allocate(size_t{1} << 60));
  EXPECT_NE(block_pool().allocate(2 * kMiB).get(), nullptr);
}

}  // namespace
}  // namespace godwit::ops
