// The two tiers of the prefix cache: what leaves first, and that a state comes back at the same bits.
#include "godwit/infer/prefix_cache.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "godwit/infer/prompt_lookup.h"
#include "tests/model/tiny.h"
#include "tests/support/compare.h"

namespace godwit {
namespace {

std::vector<int64_t> text(int64_t first, int64_t pages) {
  std::vector<int64_t> out(pages * kLatentPage, 1);
  out[0] = first;
  return out;
}

// A prompt that goes on where `prefix` ends.
std::vector<int64_t> longer(std::vector<int64_t> prefix) {
  prefix.push_back(5);
  return prefix;
}

class PrefixTiers : public ::testing::Test {
 protected:
  PrefixTiers() : state_(test::tiny_config(), {.sequences = 2, .pages = 8}, at::kCPU, at::kFloat) {}

  // A state of `pages` pages whose values are all `value`.
  StateSnapshot snapshot(double value, int64_t pages) {
    state_.clear(0);
    EXPECT_TRUE(state_.reserve(0, pages * kLatentPage));
    for (LayerState& layer : state_.layers()) {
      if (layer.kda.recurrent.defined()) layer.kda.recurrent[0].fill_(value);
      if (!layer.pages.defined()) continue;
      for (int64_t p = 0; p < pages; ++p) layer.pages[state_.sequence(0).pages[p]].fill_(value);
    }
    state_.advance(0, pages * kLatentPage);
    StateSnapshot out = state_.snapshot(0);
    state_.clear(0);
    return out;
  }
  int64_t slot_bytes() const { return ModelState::slot_bytes(test::tiny_config(), at::kFloat); }
  int64_t host_bytes(int64_t pages) const {
    return slot_bytes() + pages * ModelState::page_bytes(test::tiny_config(), at::kFloat);
  }

  ModelState state_;
};

TEST_F(PrefixTiers, TheLeastUsedLeavesForHostMemoryThenForGood) {
  PrefixCache cache({.max_bytes = 2 * slot_bytes(), .host_bytes = 2 * host_bytes(1)}, state_);
  for (const int32_t id : {10, 11}) cache.insert(text(id, 1), snapshot(id, 1));
  ASSERT_TRUE(cache.find(longer(text(10, 1))));  // 11 is now the older one
  cache.insert(text(12, 1), snapshot(12, 1));
  EXPECT_EQ(cache.entries(), 3);
  EXPECT_EQ(cache.host_entries(), 1);
  EXPECT_EQ(cache.bytes(), 2 * slot_bytes());
  EXPECT_EQ(cache.host_bytes(), host_bytes(1));
  EXPECT_FALSE(cache.find(longer(text(11, 1)))->stored);
  EXPECT_TRUE(cache.find(longer(text(10, 1)))->stored);
  cache.insert(text(13, 1), snapshot(13, 1));  // 12 follows 11
  cache.insert(text(14, 1), snapshot(14, 1));  // 10 too, and 11 has no place any more
  EXPECT_FALSE(cache.find(longer(text(11, 1))));
  EXPECT_FALSE(cache.find(longer(text(12, 1)))->stored);
  EXPECT_FALSE(cache.find(longer(text(10, 1)))->stored);
  EXPECT_TRUE(cache.find(longer(text(14, 1)))->stored);
  EXPECT_LE(cache.host_bytes(), 2 * host_bytes(1));
}

TEST_F(PrefixTiers, EvictionFreesThePagesAndTheStateComesBack) {
  PrefixCache cache({}, state_);
  cache.insert(text(10, 3), snapshot(0.75, 3));
  EXPECT_EQ(state_.free_pages(), 5);
  EXPECT_TRUE(cache.evict());
  EXPECT_FALSE(cache.evict());
  EXPECT_EQ(state_.free_pages(), 8);
  snapshot(-1, 8);  // other sequences use the pages
  const auto hit = cache.find(longer(text(10, 3)));
  ASSERT_TRUE(hit && !hit->stored);
  ASSERT_TRUE(state_.swap_in(1, hit->host));
  EXPECT_EQ(state_.length(1), 3 * kLatentPage);
  for (LayerState& layer : state_.layers()) {
    if (layer.kda.recurrent.defined()) {
      EXPECT_TRUE(layer.kda.recurrent[1].eq(0.75).all().item<bool>());
    } else {
      for (int64_t p = 0; p < 3; ++p)
        EXPECT_TRUE(layer.pages[state_.sequence(1).pages[p]].eq(0.75).all().item<bool>());
    }
  }
  cache.insert(text(10, 3), state_.snapshot(1));  // back in the store
  EXPECT_EQ(cache.host_entries(), 0);
  EXPECT_EQ(cache.host_bytes(), 0);
  EXPECT_TRUE(cache.find(longer(text(10, 3)))->stored);
}

// Where a server reads prompts in pieces of fixed ends, states lie there alone.
TEST_F(PrefixTiers, BoundariesAreMultiplesOfTheGranule) {
  PrefixCache cache({.interval = 4 * kLatentPage, .granule = 2 * kLatentPage}, state_);
  const auto pages = [&](const std::vector<int64_t>& prompt, int64_t start) {
    std::vector<int64_t> out = cache.boundaries(prompt, start);
    for (int64_t& at : out) at /= kLatentPage;
    return out;
  };
  EXPECT_EQ(pages(longer(text(10, 7)), 0), (std::vector<int64_t>{4, 6}));
  EXPECT_EQ(pages(text(11, 6), 0), (std::vector<int64_t>{4, 6}));  // 4: the same prompt again
  std::vector<int64_t> branch = text(10, 7);
  branch[3 * kLatentPage] = 9;
  EXPECT_EQ(pages(branch, 0), (std::vector<int64_t>{2, 4, 6}));  // parts from the first on its page 3
  EXPECT_EQ(pages(branch, 4 * kLatentPage), (std::vector<int64_t>{6}));
  EXPECT_TRUE(pages(text(12, 1), 0).empty());
}

TEST_F(PrefixTiers, WithoutHostBudgetAnEvictedStateIsGone) {
  PrefixCache cache({.host_bytes = 0}, state_);
  cache.insert(text(10, 1), snapshot(1, 1));
  EXPECT_TRUE(cache.evict());
  EXPECT_EQ(cache.entries(), 0);
  EXPECT_EQ(cache.host_entries(), 0);
  EXPECT_FALSE(cache.find(longer(text(10, 1))));
}

TEST(PromptLookup, FollowsTheLatestPlace) {
  PromptLookup lookup;
  std::vector<int32_t> text = {1, 2, 3, 4, 9, 2, 3, 7, 8, 2, 3};
  EXPECT_EQ(lookup.draft(text, 3), (std::vector<int32_t>{7, 8, 2}));
  EXPECT_EQ(lookup.draft(text, 1), (std::vector<int32_t>{7}));
  EXPECT_EQ(lookup.draft(text, 0), std::vector<int32_t>{});
  text.insert(text.end(), {1, 2, 3, 4});  // the longer context decides: after 1 2 3 4 came 9
  EXPECT_EQ(lookup.draft(text, 2), (std::vector<int32_t>{9, 2}));
  text.push_back(100);
  EXPECT_EQ(lookup.draft(text, 2), std::vector<int32_t>{});
  EXPECT_EQ(PromptLookup().draft(std::vector<int32_t>{1}, 4), std::vector<int32_t>{});
}

}  // namespace
}  // namespace godwit
