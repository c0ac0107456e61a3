// moe_router against its composition, ties, groups, and Quantile Balancing's statistics.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "godwit/ops/moe_routing.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/moe_router_ref.h"
#include "godwit/ops/ref/qb_histogram_ref.h"
#include "tests/support/gradients.h"

namespace godwit {
namespace {

using at::Tensor;

struct Form {
  int64_t experts = 896;
  int64_t k = 16;
  bool renormalize = true;
  double scale = 1;
  int64_t groups = 1;
  int64_t topk_groups = 1;
};

auto route(const Form& f, const Tensor& logits, const Tensor& bias) {
  return ops::moe_router(logits, bias, f.k, f.renormalize, f.scale, f.groups, f.topk_groups);
}
auto route_ref(const Form& f, const Tensor& logits, const Tensor& bias) {
  return ops::ref::moe_router(logits, bias, f.k, f.renormalize, f.scale, f.groups, f.topk_groups);
}

// The choice is discrete: the oracle ranks the op's own scores, so that rounding of the sigmoid cannot flip
// it.
void check_routes(const Form& f, const Tensor& logits, const Tensor& bias) {
  const auto [weights, experts, scores, cutoff] = route(f, logits, bias);
  EXPECT_TRUE(test::close(scores, at::sigmoid(logits.to(at::kDouble)), test::kFp32));
  const Tensor exact_logits = at::logit(scores.to(at::kDouble));
  const auto [weights64, experts64, scores64, cutoff64] = route_ref(f, exact_logits, bias.to(at::kDouble));
  const Tensor gap =
      cutoff64 -
      (scores.to(at::kDouble) + bias.to(at::kDouble)).gather(1, experts64.to(at::kLong)).select(1, f.k - 1);
  EXPECT_TRUE(test::bit_equal(experts, experts64)) << "closest to the cutoff: " << gap.abs().min();
  EXPECT_TRUE(test::close(weights, weights64, test::kFp32));
  if (f.k < f.experts) {
    EXPECT_TRUE(test::close(cutoff, cutoff64, test::kFp32));
  } else {
    EXPECT_TRUE(at::isneginf(cutoff).all().item<bool>());
  }
  const auto [weights1, experts1, cutoff1] =
      ops::moe_route(logits, bias, f.k, f.renormalize, f.scale, f.groups, f.topk_groups);
  EXPECT_TRUE(test::bit_equal(weights1, weights) && test::bit_equal(experts1, experts) &&
              test::bit_equal(cutoff1, cutoff));
  const Tensor projection = at::randn(weights.sizes());
  const auto weights_of = [&](auto&& routes) { return std::get<0>(routes); };
  const auto got =
      test::gradients([&](const auto& x) { return weights_of(route(f, x[0], bias)); }, {logits}, projection);
  const auto expected =
      test::gradients([&](const auto& x) { return weights_of(route_ref(f, x[0], bias.to(at::kDouble))); },
                      {exact_logits}, projection);
  EXPECT_TRUE(test::close(got[0], expected[0], test::kFp32Grad));
}

Tensor spread_bias(int64_t experts) {
  return at::randn({experts}) * 0.1;
}

TEST(MoeRouter, MatchesOracle) {
  at::manual_seed(1);
  for (const int64_t tokens : {1, 15, 16, 17, 63, 64, 65, 257}) {
    check_routes({}, at::randn({tokens, 896}), spread_bias(896));
  }
  check_routes({.experts = 896, .k = 1}, at::randn({33, 896}), spread_bias(896));
  check_routes({.experts = 12, .k = 3, .scale = 2.5}, at::randn({33, 12}), spread_bias(12));
  check_routes({.experts = 100, .k = 8, .renormalize = false}, at::randn({33, 100}), spread_bias(100));
  check_routes({.experts = 20, .k = 20}, at::randn({33, 20}), spread_bias(20));
  check_routes({.experts = 300, .k = 150}, at::randn({9, 300}), spread_bias(300));
  check_routes({.experts = 2000, .k = 31}, at::randn({9, 2000}), spread_bias(2000));
}

TEST(MoeRouter, NoTokens) {
  const auto [weights, experts, scores, cutoff] = route({}, at::empty({0, 896}), at::zeros({896}));
  EXPECT_EQ(experts.sizes(), (std::vector<int64_t>{0, 16}));
  EXPECT_EQ(cutoff.sizes(), (std::vector<int64_t>{0}));
}

TEST(MoeRouter, Groups) {
  at::manual_seed(2);
  check_routes({.experts = 64, .k = 6, .groups = 8, .topk_groups = 3}, at::randn({65, 64}), spread_bias(64));
  check_routes({.experts = 64, .k = 6, .groups = 8, .topk_groups = 8}, at::randn({65, 64}), spread_bias(64));
  check_routes({.experts = 12, .k = 2, .groups = 12, .topk_groups = 4}, at::randn({65, 12}), spread_bias(12));
  // Everything outside the groups is at -inf, and so is the cutoff if the groups hold just k.
  const auto routes =
      route({.experts = 64, .k = 16, .groups = 8, .topk_groups = 2}, at::randn({9, 64}), at::zeros({64}));
  EXPECT_TRUE(at::isneginf(std::get<3>(routes)).all().item<bool>());
}

TEST(MoeRouter, TiesGoToTheLowerIndex) {
  for (const int64_t experts : {5, 64, 896}) {
    const Form f{.experts = experts, .k = 3};
    const auto same = route(f, at::zeros({2, experts}), at::zeros({experts}));
    EXPECT_TRUE(test::bit_equal(std::get<1>(same)[1], at::tensor({0, 1, 2}, at::kInt)));
    Tensor logits = at::full({1, experts}, -1.0);
    logits[0][experts - 1] = 0.5;
    logits[0][experts - 3] = 0.5;
    const auto pair = route(f, logits, at::zeros({experts}));
    const auto last = static_cast<int>(experts);
    EXPECT_TRUE(test::bit_equal(std::get<1>(pair)[0], at::tensor({last - 3, last - 1, 0}, at::kInt)));
  }
  at::manual_seed(3);  // few distinct values, many ties
  check_routes({}, at::randint(-2, 3, {65, 896}, at::kFloat) * 0.5,
               at::randint(0, 2, {896}, at::kFloat) * 0.25);
}

// The bias moves the choice and never the weight (K3 report eq. 11).
TEST(MoeRouter, BiasOnlyChooses) {
  at::manual_seed(4);
  const Form f{.experts = 32, .k = 4};
  const Tensor logits = at::randn({17, 32});
  Tensor bias = at::zeros({32});
  bias[7] = 10;
  const auto [weights, experts, scores, cutoff] = route(f, logits, bias);
  EXPECT_TRUE(experts.select(1, 0).eq(7).all().item<bool>());
  const Tensor chosen = scores.gather(1, experts.to(at::kLong));
  EXPECT_TRUE(test::close(weights, chosen / chosen.sum(1, true), test::kFp32));
}

TEST(MoeRouter, TokensAndThreadsDoNotMatter) {
  at::manual_seed(5);
  const Tensor logits = at::randn({257, 896}), bias = spread_bias(896);
  const int threads = at::get_num_threads();
  at::set_num_threads(3);
  const auto whole = route({}, logits, bias);
  at::set_num_threads(1);
  const auto single = route({}, logits, bias), part = route({}, logits.narrow(0, 100, 1), bias);
  at::set_num_threads(threads);
  EXPECT_TRUE(test::bit_equal(std::get<1>(whole), std::get<1>(single)));
  EXPECT_TRUE(test::bit_equal(std::get<0>(whole), std::get<0>(single)));
  EXPECT_TRUE(test::bit_equal(std::get<0>(whole).narrow(0, 100, 1), std::get<0>(part)));
}

TEST(MoeRouter, GradientMatchesFiniteDifference) {
  at::manual_seed(6);
  const Tensor bias = at::zeros({12}, at::kDouble);
  EXPECT_TRUE(test::matches_finite_difference(
      [&](const auto& x) { return std::get<0>(ops::ref::moe_router(x[0], bias, 3, true, 1.5, 1, 1)); },
      {at::randn({9, 12}, at::kDouble)}, at::randn({9, 3}, at::kDouble)));
}

TEST(MoeRouter, SurvivesNan) {
  Tensor logits = at::randn({3, 896});
  logits[1].fill_(std::numeric_limits<float>::quiet_NaN());
  const Tensor experts = std::get<1>(route({}, logits, at::zeros({896})));
  EXPECT_TRUE(experts.ge(0).logical_and(experts.lt(896)).all().item<bool>());
}

TEST(MoeRouter, RefusesBadArguments) {
  const Tensor logits = at::randn({3, 12}), bias = at::zeros({12});
  EXPECT_THROW(ops::moe_router(logits, bias, 13, true, 1, 1, 1), c10::Error);
  EXPECT_THROW(ops::moe_router(logits, at::zeros({11}), 3, true, 1, 1, 1), c10::Error);
  EXPECT_THROW(ops::moe_router(logits, bias, 3, true, 1, 5, 1), c10::Error);
  EXPECT_THROW(ops::moe_router(logits, bias, 3, true, 1, 6, 1), c10::Error);
  EXPECT_THROW(ops::moe_router(logits.to(at::kBFloat16), bias, 3, true, 1, 1, 1), c10::Error);
}

// --- Quantile Balancing (K3 report, Appendix C and D) ---

// -quantile of the margins s_j - cutoff that leaves q = m k / n of them above, then centred.
Tensor exact_bias(const Tensor& scores, const Tensor& cutoff, int64_t k) {
  const int64_t m = scores.size(0), n = scores.size(1), q = m * k / n;
  const Tensor required = cutoff.unsqueeze(1) - scores;  // ascending: -margin
  const Tensor bias = std::get<0>(required.sort(/*dim=*/0, /*descending=*/false))[q];
  return bias - bias.mean();
}

TEST(QuantileBalance, WorkedExample) {
  // Eight tokens, four experts, k = 1; without bias the loads are 4, 3, 1, 0.
  const Tensor scores =
      at::tensor({0.95f, 0.60f, 0.34f, 0.31f, 0.32f, 0.91f, 0.51f, 0.38f, 0.72f, 0.78f, 0.22f,
                  0.50f, 0.75f, 0.27f, 0.22f, 0.13f, 0.86f, 0.23f, 0.80f, 0.56f, 0.69f, 0.19f,
                  0.81f, 0.34f, 0.48f, 0.78f, 0.35f, 0.68f, 0.46f, 0.21f, 0.11f, 0.13f})
          .view({8, 4});
  const Form f{.experts = 4, .k = 1};
  const auto loads = [&](const Tensor& bias) {
    return at::bincount(std::get<1>(route(f, at::logit(scores), bias)).view({-1}), {}, 4);
  };
  const Tensor zero = at::zeros({4});
  ASSERT_TRUE(test::bit_equal(loads(zero), at::tensor({4, 3, 1, 0}, at::kLong)));
  const auto [weights, experts, s, cutoff] = route(f, at::logit(scores), zero);
  EXPECT_TRUE(test::bit_equal(loads(exact_bias(s, cutoff, 1)), at::tensor({2, 2, 2, 2}, at::kLong)));
}

TEST(QuantileBalance, HistogramMatchesOracleAndQuantile) {
  at::manual_seed(7);
  constexpr int64_t kTokens = 3000, kExperts = 71, kSlots = 8, kBins = 1000;
  const Form f{.experts = kExperts, .k = kSlots};
  const Tensor logits = at::randn({kTokens, kExperts}) + at::randn({kExperts});
  const auto [weights, experts, scores, cutoff] = route(f, logits, at::zeros({kExperts}));
  const double low = -1, high = 1;
  Tensor counts = at::zeros({kExperts, kBins}, at::kLong), expected = at::zeros_like(counts);
  ops::qb_histogram(scores, cutoff, low, high, counts);
  ops::ref::qb_histogram(scores, cutoff, low, high, expected);
  EXPECT_TRUE(test::bit_equal(counts, expected));
  Tensor again = at::zeros_like(counts);
  ops::qb_histogram_of_logits(logits, cutoff, low, high, again);
  EXPECT_TRUE(test::bit_equal(again, counts));
  EXPECT_TRUE(counts.sum(1).eq(kTokens).all().item<bool>());
  // The quantile read from the histogram lies within one bin of the exact one.
  const int64_t rank = kTokens * kSlots / kExperts;
  const Tensor first_bin = counts.cumsum(1).lt(rank + 1).sum(1).to(at::kDouble);
  const double width = (high - low) / kBins;
  const Tensor exact =
      std::get<0>((cutoff.unsqueeze(1) - scores).sort(/*dim=*/0, /*descending=*/false))[rank];
  const Tensor distance = exact.to(at::kDouble) - (low + first_bin * width);
  EXPECT_GE(distance.min().item<double>(), -1e-6);
  EXPECT_LE(distance.max().item<double>(), width + 1e-6);
  // It adds: a second batch doubles.
  ops::qb_histogram(scores, cutoff, low, high, counts);
  EXPECT_TRUE(test::bit_equal(counts, expected * 2));
}

TEST(QuantileBalance, EndsOfTheRangeAndNoCutoff) {
  Tensor counts = at::zeros({3, 4}, at::kLong);
  const float infinity = std::numeric_limits<float>::infinity();
  const Tensor scores = at::tensor({0.5f, 0.0f, 1.0f, 0.5f, 0.5f, 0.5f}).view({2, 3});
  ops::qb_histogram(scores, at::tensor({5.0f, -infinity}), -1, 1, counts);
  EXPECT_TRUE(
      test::bit_equal(counts, at::tensor({1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1}, at::kLong).view({3, 4})));
  EXPECT_THROW(ops::qb_histogram(scores, at::zeros({3}), -1, 1, counts), c10::Error);
  EXPECT_THROW(ops::qb_histogram(scores, at::zeros({2}), 1, 1, counts), c10::Error);
}

// An over-used expert loses load after one update (the sign of the bias agrees with the router's).
TEST(QuantileBalance, OverusedExpertLosesLoad) {
  at::manual_seed(8);
  const Form f{.experts = 32, .k = 4};
  Tensor logits = at::randn({2000, 32});
  logits.select(1, 5).add_(3);
  const auto load = [&](const Tensor& bias) {
    return std::get<1>(route(f, logits, bias)).eq(5).sum().item<int64_t>();
  };
  const auto [weights, experts, scores, cutoff] = route(f, logits, at::zeros({32}));
  EXPECT_GT(load(at::zeros({32})), 1500);
  EXPECT_LT(load(exact_bias(scores, cutoff, 4)), 500);
}

}  // namespace
}  // namespace godwit
