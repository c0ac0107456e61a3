#include "godwit/infer/sampler.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>

#include "godwit/base/check.h"

namespace godwit {
namespace {

at::Tensor logits_of(const std::vector<double>& probabilities) {
  return at::log(at::tensor(probabilities)).to(at::kFloat);
}

std::map<int64_t, double> frequencies(const at::Tensor& logits, const SamplingParams& params,
                                      const at::Tensor& forbidden = {}) {
  std::map<int64_t, double> counts;
  constexpr int kDraws = 20000;
  for (int i = 0; i < kDraws; ++i) counts[sample(logits, params, i, forbidden).id] += 1.0 / kDraws;
  return counts;
}

TEST(Sampler, FollowsTheDistribution) {
  const at::Tensor logits = logits_of({0.5, 0.3, 0.15, 0.05});
  const auto seen = frequencies(logits, {});
  EXPECT_NEAR(seen.at(0), 0.5, 0.02);  // 0.02 is over five standard deviations of 20,000 draws
  EXPECT_NEAR(seen.at(3), 0.05, 0.02);
  const auto sharp = frequencies(logits, {.temperature = 0.5});
  EXPECT_NEAR(sharp.at(0), 0.25 / (0.25 + 0.09 + 0.0225 + 0.0025), 0.02);
}

TEST(Sampler, CutsTopKTopPMinPAndForbidden) {
  const at::Tensor logits = logits_of({0.5, 0.3, 0.15, 0.05});
  EXPECT_EQ(frequencies(logits, {.top_k = 2}).size(), 2u);
  EXPECT_EQ(frequencies(logits, {.top_p = 0.79}).size(), 2u);
  EXPECT_EQ(frequencies(logits, {.top_p = 0.81}).size(), 3u);
  EXPECT_EQ(frequencies(logits, {.top_p = 0.0}).size(), 1u);
  EXPECT_EQ(frequencies(logits, {.min_p = 0.25}).size(), 3u);
  at::Tensor forbidden = at::zeros({4}, at::kBool);
  forbidden[0] = true;
  const auto seen = frequencies(logits, {}, forbidden);
  EXPECT_FALSE(seen.contains(0));
  EXPECT_NEAR(seen.at(1), 0.6, 0.02);
  EXPECT_EQ(sample(logits, {.temperature = 0}, 0, forbidden).id, 1);
}

// More tokens than are sorted at first: the same set as by sorting all of them, and each as often as it
// should.
TEST(Sampler, NucleusOfAFlatDistribution) {
  constexpr int64_t kTokens = 3000;
  constexpr int kDraws = 2000;
  at::manual_seed(3);
  const at::Tensor logits = at::randn({kTokens});
  const auto [sorted, order] =
      logits.to(at::kDouble).softmax(0).sort(/*stable=*/true, 0, /*descending=*/true);
  for (const auto& [top_k, top_p] :
       {std::pair<int64_t, double>{0, 0.9}, {0, 0.5}, {700, 0.999}, {1000, 1.0}}) {
    const at::Tensor kept = top_k > 0 ? sorted.slice(0, 0, top_k) : sorted;
    const at::Tensor before = kept.cumsum(0) - kept;
    const int64_t size = top_p < 1 ? (before < top_p * kept.sum()).sum().item<int64_t>() : kept.size(0);
    std::vector<bool> allowed(kTokens);
    for (int64_t i = 0; i < size; ++i) allowed[order[i].item<int64_t>()] = true;
    int likeliest = 0;
    for (int64_t position = 0; position < kDraws; ++position) {
      const int64_t id =
          sample(logits, {.top_p = top_p, .top_k = top_k, .seed = 1}, position, {}, nullptr).id;
      ASSERT_TRUE(allowed[id]) << id;
      likeliest += id == order[0].item<int64_t>() ? 1 : 0;
    }
    const double p = (sorted[0] / kept.slice(0, 0, size).sum()).item<double>();
    EXPECT_NEAR(likeliest, kDraws * p, 5 * std::sqrt(kDraws * p)) << top_k << " " << top_p;
  }
}

TEST(Sampler, GreedyTakesTheFirstOfEqualTokensAndReportsTheModelsLogprob) {
  const Sampled s = sample(logits_of({0.2, 0.4, 0.4}), {.temperature = 0}, 0);
  EXPECT_EQ(s.id, 1);
  EXPECT_NEAR(s.logprob, std::log(0.4), 1e-6);
}

TEST(Sampler, IsAFunctionOfSeedAndPosition) {
  const at::Tensor logits = at::zeros({1000});
  EXPECT_EQ(sample(logits, {.seed = 3}, 17).id, sample(logits, {.seed = 3}, 17).id);
  EXPECT_NE(sample(logits, {.seed = 3}, 17).id, sample(logits, {.seed = 3}, 18).id);
  EXPECT_NE(sample(logits, {.seed = 3}, 17).id, sample(logits, {.seed = 4}, 17).id);
}

TEST(Sampler, RefusesNanAndNothingToDraw) {
  at::Tensor logits = at::zeros({4});
  logits[2] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THROW(sample(logits, {}, 0), Error);
  EXPECT_THROW(sample(at::zeros({4}), {}, 0, at::ones({4}, at::kBool)), Error);
}

}  // namespace
}  // namespace godwit
