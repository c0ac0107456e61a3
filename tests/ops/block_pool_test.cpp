// The pool of large blocks: what is freed comes again in any size, keeps apart what is in use, and the system
// never gives more than was in use at once.
#include "godwit/ops/block_pool.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <thread>
#include <vector>

namespace godwit::ops {
namespace {

constexpr size_t kMiB = 1 << 20;

TEST(BlockPool, WhatIsFreedComesAgain) {
  const void* first = nullptr;
  {
    const c10::DataPtr block = block_pool().allocate(40 * kMiB);
    first = block.get();
    std::memset(block.get(), 1, 40 * kMiB);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % 64, 0u);
  }
  const BlockPoolUse before = block_pool_use();
  {
    const c10::DataPtr front = block_pool().allocate(29 * kMiB);  // its front, in steps of 2 MiB
    EXPECT_EQ(front.get(), first);
    const c10::DataPtr rest = block_pool().allocate(10 * kMiB);
    EXPECT_EQ(static_cast<const char*>(rest.get()), static_cast<const char*>(first) + 30 * kMiB);
  }
  // Both parts are moved together again; only what is missing is new.
  const c10::DataPtr larger = block_pool().allocate(44 * kMiB);
  std::memset(larger.get(), 2, 44 * kMiB);
  const BlockPoolUse after = block_pool_use();
  EXPECT_EQ(after.joined, before.joined + 1);
  EXPECT_EQ(after.taken, before.taken + static_cast<int64_t>(4 * kMiB));
  EXPECT_EQ(after.kept, 0);
}

TEST(BlockPool, SmallBlocksAreNotItsOwn) {
  const BlockPoolUse before = block_pool_use();
  for (const size_t size : {size_t{0}, size_t{1}, static_cast<size_t>(kPooledBytes) - 1}) {
    const c10::DataPtr block = block_pool().allocate(size);
    if (size > 0) std::memset(block.get(), 7, size);
  }
  const BlockPoolUse after = block_pool_use();
  EXPECT_EQ(after.taken, before.taken);
  EXPECT_EQ(after.live, before.live);
}

// Blocks come and go at random; each keeps its own bytes, and no more is held than was in use at once.
TEST(BlockPool, KeepsBlocksApartAndHoldsNoMoreThanWasInUse) {
  struct Held {
    c10::DataPtr block;
    size_t words;
    uint64_t mark;
  };
  const auto words_of = [](const Held& held) { return static_cast<uint64_t*>(held.block.get()); };
  std::mt19937 random(3);
  std::vector<Held> held;
  int64_t most = block_pool_use().live + block_pool_use().kept;
  const int64_t joined = block_pool_use().joined;
  for (uint64_t i = 0; i < 1500; ++i) {
    if (held.size() < 20 && random() % 2 == 0) {
      const size_t size = 4 * kMiB + random() % (16 * kMiB);
      held.push_back({block_pool().allocate(size), size / sizeof(uint64_t), i});
      for (size_t w = 0; w < held.back().words; w += 512) words_of(held.back())[w] = i + w;  // every page
    } else if (!held.empty()) {
      std::swap(held[random() % held.size()], held.back());
      for (size_t w = 0; w < held.back().words; w += 512)
        ASSERT_EQ(words_of(held.back())[w], held.back().mark + w) << i;
      held.pop_back();
    }
    const BlockPoolUse use = block_pool_use();
    most = std::max(most, use.live);
    ASSERT_LE(use.live + use.kept, most) << i;
  }
  held.clear();
  EXPECT_EQ(block_pool_use().live, 0);
  EXPECT_GT(block_pool_use().joined, joined + 10);
  EXPECT_LT(block_pool_use().taken, most + 64 * static_cast<int64_t>(kMiB));
}

TEST(BlockPool, ManyThreads) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < 100; ++i) {
        const size_t size = kMiB * (4 + (i + t) % 9);
        const c10::DataPtr block = block_pool().allocate(size);
        auto* bytes = static_cast<unsigned char*>(block.get());
        std::memset(bytes, t + 1, size);
        EXPECT_EQ(bytes[0], t + 1);
        EXPECT_EQ(bytes[size / 2], t + 1);
        EXPECT_EQ(bytes[size - 1], t + 1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(block_pool_use().live, 0);
}

// As oneDNN takes and frees its buffers.
TEST(BlockPool, BlocksByTheirAddressAlone) {
  for (const size_t size : {size_t{100}, 9 * kMiB}) {
    void* data = block_pool().raw_allocate(size);
    std::memset(data, 1, size);
    block_pool().raw_deallocate(data);
  }
  EXPECT_EQ(block_pool_use().live, 0);
}

// More than there is: an error that a caller can answer, and the pool goes on.
TEST(BlockPool, TooMuchIsAnError) {
  EXPECT_ANY_THROW(block_pool().allocate(size_t{1} << 60));
  EXPECT_ANY_THROW(block_pool().allocate(size_t{1} << 48));
  EXPECT_NE(block_pool().allocate(5 * kMiB).get(), nullptr);
}

}  // namespace
}  // namespace godwit::ops
