#include "godwit/train/balance.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "godwit/base/check.h"
#include "godwit/ops/ops.h"
#include "tests/support/compare.h"

namespace godwit {
namespace {

using at::Tensor;
using test::bit_equal;
using test::close;
using ::testing::HasSubstr;

struct Routing {
  Tensor experts, logits, scores, cutoff;
};

Routing route(const Tensor& logits, const Tensor& bias, int64_t k) {
  auto [weights, experts, scores, cutoff] = ops::moe_router(logits, bias, k, true, 1.0, 1, 1);
  return {experts, logits, scores, cutoff};
}

Tensor loads(const Tensor& experts, int64_t count) {
  return at::bincount(experts.flatten().to(at::kLong), {}, count);
}

// One training step of one layer in `micro` pieces.
LayerBalance step(Balancer& balancer, const Tensor& logits, const Tensor& bias, int64_t k,
                  int64_t micro = 1) {
  balancer.begin_step();
  for (const Tensor& part : logits.chunk(micro)) {
    const Routing r = route(part, bias, k);
    balancer.observe(0, r.experts, r.logits, r.cutoff);
  }
  return balancer.end_step(logits.size(0)).layers[0];
}

BalanceOptions with(BalanceMethod method) {
  BalanceOptions o;
  o.method = method;
  return o;
}

// Scores of eight tokens for four experts whose top-1 loads are (4, 3, 1, 0), as in the report's figure.
Tensor figure_scores() {
  return at::tensor({.22, .68, .13, .16, .80, .52, .26, .07, .95, .73, .38, .13, .71, .86, .29, .06,
                     .89, .56, .50, .72, .99, .15, .83, .21, .60, .18, .79, .31, .62, .84, .08, .75},
                    at::kDouble)
      .view({8, 4});
}

TEST(QuantileBalance, OneUpdateEvensTheFigure) {
  const Tensor scores = figure_scores(), zero = at::zeros({4}, at::kDouble);
  EXPECT_TRUE(bit_equal(loads(scores.argmax(1), 4), at::tensor({4, 3, 1, 0}, at::kLong)));
  const Tensor exact = exact_quantile_bias(scores, zero, 1);
  EXPECT_TRUE(close(exact, at::tensor({-.1425, -.0625, .1175, .0875}, at::kDouble), test::kFp64));
  EXPECT_TRUE(bit_equal(loads((scores + exact).argmax(1), 4), at::full({4}, 2, at::kLong)));

  Balancer balancer(with(BalanceMethod::kQuantile));
  const Tensor bias = at::zeros({4});
  balancer.add_layer("layer", bias, 1);
  const LayerBalance before = step(balancer, scores.logit().to(at::kFloat), bias, 1);
  EXPECT_DOUBLE_EQ(before.batch.max_vio, 1.0);
  EXPECT_EQ(before.batch.dead_experts, 1);
  EXPECT_DOUBLE_EQ(before.flip_rate, 0.375);  // (4, 3, 1, 0) -> (2, 2, 2, 2): three tokens of eight move
  EXPECT_TRUE(bit_equal(loads((scores + bias).argmax(1), 4), at::full({4}, 2, at::kLong)));
}

// m 20000, n 64, k 8, normal logits with normal per-expert offsets: MaxVio about 4 to 6, then 0.13, 0.07,
// 0.05, ...
TEST(QuantileBalance, ToyConvergesWithinAFewSteps) {
  at::manual_seed(1);
  const Tensor logits = at::randn({20000, 64}) + at::randn({64});
  const Tensor bias = at::zeros({64});
  Tensor exact = at::zeros({64}, at::kDouble);
  Balancer balancer(with(BalanceMethod::kQuantile));
  balancer.add_layer("layer", bias, 8);
  std::vector<double> histogram, reference;
  for (int i = 0; i < 6; ++i) {
    histogram.push_back(step(balancer, logits, bias, 8, /*micro=*/3).batch.max_vio);
    const Tensor scores = at::sigmoid(logits);
    reference.push_back(
        load_stats(loads(std::get<1>(at::topk(scores + exact.to(at::kFloat), 8, 1)), 64)).max_vio);
    exact = exact_quantile_bias(scores, exact, 8);
  }
  EXPECT_GT(histogram[0], 3);
  EXPECT_DOUBLE_EQ(histogram[0], reference[0]);
  EXPECT_LT(histogram[1], 0.2);
  EXPECT_LT(histogram[2], 0.12);
  EXPECT_LT(histogram[5], 0.08);  // the floor that the bin width sets
  EXPECT_LT(reference[5], 0.03);
  EXPECT_LT(std::abs(bias.mean().item<double>()), 1e-6);
}

TEST(QuantileBalance, HistogramIsWithinOneBinOfTheExactQuantile) {
  at::manual_seed(2);
  const Tensor bias = at::randn({16}) * 0.2;
  for (const int64_t tokens : {1, 15, 16, 17, 257}) {
    const Tensor logits = at::randn({tokens, 16});
    const Tensor exact = exact_quantile_bias(at::sigmoid(logits), bias, 3);
    Balancer balancer(with(BalanceMethod::kQuantile));
    const Tensor updated = bias.clone();
    balancer.add_layer("layer", updated, 3);
    step(balancer, logits, updated, 3);
    const double width = (bias.max() - bias.min()).item<double>() / kQuantileBins + 2.0 / kQuantileBins;
    // Between two order statistics any value is a quantile: with few tokens the two may lie in different
    // gaps, so the count of smaller values is compared: it is q, give or take those in one bin.
    const Routing r = route(logits, bias, 3);
    const Tensor required = (r.cutoff.unsqueeze(1) - r.scores).to(at::kDouble);
    const double q = tokens * 3 / 16.0;
    const double range_min = bias.min().item<double>() - 1, range_max = bias.max().item<double>() + 1;
    Tensor counts = at::zeros({16, kQuantileBins}, at::kLong);
    ops::qb_histogram(r.scores, r.cutoff, range_min, range_max, counts);
    const Tensor b = quantile_from_histogram(counts, range_min, range_max, q);
    const Tensor below = (required <= b - width).sum(0), up_to = (required <= b + width).sum(0);
    EXPECT_LE(below.max().item<int64_t>(), std::ceil(q)) << tokens;
    EXPECT_GE(up_to.min().item<int64_t>(), std::ceil(q)) << tokens;
    EXPECT_TRUE(close(updated, (b - b.mean()).to(at::kFloat), test::kFp32)) << tokens;
    if (tokens == 257) {
      EXPECT_LT((updated - exact).abs().max().item<double>(), 0.1);  // margins are dense by then
    }
  }
}

TEST(QuantileBalance, HandlesHeapsAndEnds) {
  // Everything in one bin, and everything in the last one.
  Tensor counts = at::zeros({2, 10}, at::kLong);
  counts[0][3] = 8;
  counts[1][9] = 8;
  const Tensor b = quantile_from_histogram(counts, 0, 10, 2);
  EXPECT_TRUE(close(b, at::tensor({3.25, 9.25}, at::kDouble), test::kFp64));
  EXPECT_TRUE(
      close(quantile_from_histogram(counts, 0, 10, 8), at::tensor({4., 10.}, at::kDouble), test::kFp64));
}

// The one property that a sign slip anywhere between router and rule would break.
TEST(Balance, AnOverusedExpertLosesLoadAfterOneUpdate) {
  at::manual_seed(3);
  const Tensor logits = at::randn({512, 8});
  logits.select(1, 5).add_(1.0);
  logits.select(1, 2).sub_(1.0);
  for (const BalanceMethod method : {BalanceMethod::kQuantile, BalanceMethod::kSign}) {
    BalanceOptions o = with(method);
    o.sign_rate = 0.05;
    const Tensor bias = at::zeros({8});
    Balancer balancer(o);
    balancer.add_layer("layer", bias, 2);
    const Tensor before = loads(route(logits, bias, 2).experts, 8);
    step(balancer, logits, bias, 2);
    const Tensor after = loads(route(logits, bias, 2).experts, 8);
    EXPECT_LT(after[5].item<int64_t>(), before[5].item<int64_t>());
    EXPECT_GT(after[2].item<int64_t>(), before[2].item<int64_t>());
  }
}

TEST(Balance, NoneAndAuxLossLeaveTheBias) {
  for (const BalanceMethod method : {BalanceMethod::kNone, BalanceMethod::kAuxLoss}) {
    const Tensor bias = at::tensor({0.5f, 0.f, 0.f, -0.5f});
    const Tensor before = bias.clone();
    Balancer balancer(with(method));
    balancer.add_layer("layer", bias, 1);
    const LayerBalance report = step(balancer, at::randn({32, 4}), bias, 1);
    EXPECT_TRUE(bit_equal(bias, before));
    EXPECT_EQ(report.flip_rate, 0);
  }
}

TEST(Balance, EmaKeepsAShareOfTheOldBias) {
  at::manual_seed(4);
  const Tensor logits = at::randn({256, 8}), start = at::randn({8}) * 0.1;
  const Tensor centred = start - start.mean();
  std::vector<Tensor> results;
  for (const double ema : {0.0, 0.75}) {
    BalanceOptions o;
    o.ema = ema;
    Balancer balancer(o);
    results.push_back(centred.clone());
    balancer.add_layer("layer", results.back(), 2);
    step(balancer, logits, results.back(), 2);
  }
  EXPECT_TRUE(close(results[1], 0.75 * centred + 0.25 * results[0], test::kFp32));
}

TEST(Balance, MicroBatchesAndRanksEqualOneBatch) {
  at::manual_seed(5);
  const Tensor logits = at::randn({120, 16});
  const Tensor whole = at::zeros({16}), pieces = at::zeros({16}), rank0 = at::zeros({16}),
               rank1 = at::zeros({16});
  Balancer a({}), b({});
  a.add_layer("layer", whole, 4);
  b.add_layer("layer", pieces, 4);
  step(a, logits, whole, 4);
  step(b, logits, pieces, 4, /*micro=*/7);
  EXPECT_TRUE(bit_equal(pieces, whole));
  // Two data ranks: what the reduction adds is what the other rank counted.
  std::vector<Tensor> other;
  for (int rank = 1; rank >= 0; --rank) {
    const Tensor& bias = rank == 0 ? rank0 : rank1;
    Balancer balancer({});
    balancer.add_layer("layer", bias, 4);
    balancer.begin_step();
    const Routing r = route(rank == 0 ? logits.narrow(0, 0, 50) : logits.narrow(0, 50, 70), bias, 4);
    balancer.observe(0, r.experts, r.logits, r.cutoff);
    const auto reduce = [&](const std::vector<Tensor>& all) {
      for (size_t i = 0; i < all.size(); ++i) {
        Tensor t = all[i];
        if (rank == 0) {
          t.add_(other.at(i));
          continue;
        }
        other.push_back(t.clone());
        // rank 1 sees the sum too; take rank 0's share from the whole batch
        const Routing full = route(logits.narrow(0, 0, 50), at::zeros({16}), 4);
        if (t.dim() == 1) {
          t.add_(loads(full.experts, 16));
        } else {
          ops::qb_histogram(full.scores, full.cutoff, -1, 1, t);
        }
      }
    };
    balancer.end_step(120, reduce);
    EXPECT_TRUE(bit_equal(bias, whole)) << "rank " << rank;
  }
}

TEST(Balance, CountingTwiceIsRefused) {
  const Tensor bias = at::zeros({4}), logits = at::randn({8, 4});
  Balancer balancer({});
  balancer.add_layer("layer7", bias, 1);
  const Routing r = route(logits, bias, 1);
  EXPECT_THROW(balancer.observe(0, r.experts, r.logits, r.cutoff), Error);  // before begin_step
  balancer.begin_step();
  balancer.observe(0, r.experts, r.logits, r.cutoff);
  balancer.observe(0, r.experts, r.logits, r.cutoff);
  try {
    balancer.end_step(8);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("layer7: 16 tokens were counted, the batch has 8"));
  }
  EXPECT_TRUE(bit_equal(bias, at::zeros({4})));
  balancer.begin_step();  // a step that is thrown away leaves nothing behind
  balancer.observe(0, r.experts, r.logits, r.cutoff);
  EXPECT_EQ(balancer.end_step(8).layers.size(), 1u);
}

TEST(Balance, EdgesOfTheBatch) {
  const Tensor bias = at::zeros({4});
  Balancer balancer({});
  balancer.add_layer("layer", bias, 4);  // k = E: nothing to choose
  step(balancer, at::randn({5, 4}), bias, 4);
  EXPECT_TRUE(bit_equal(bias, at::zeros({4})));
  Balancer empty({});
  empty.add_layer("layer", bias, 1);
  empty.begin_step();
  EXPECT_EQ(empty.end_step(0).layers[0].batch.dead_experts, 4);
  EXPECT_TRUE(bit_equal(bias, at::zeros({4})));
}

// ---- statistics, alarm, resume
// ------------------------------------------------------------------------------

TEST(LoadStats, AreWhatTheyAreCalled) {
  const LoadStats even = load_stats(at::full({8}, 3, at::kLong));
  EXPECT_DOUBLE_EQ(even.max_vio, 0);
  EXPECT_DOUBLE_EQ(even.entropy, 1);
  const LoadStats one = load_stats(at::tensor({0, 6, 0}, at::kLong));
  EXPECT_DOUBLE_EQ(one.max_vio, 2);
  EXPECT_EQ(one.dead_experts, 2);
  EXPECT_DOUBLE_EQ(one.entropy, 0);
  EXPECT_EQ(load_stats(at::zeros({3}, at::kLong)).dead_experts, 3);
}

TEST(Balance, CollapseRaisesAnAlarmAndRecoveryEndsIt) {
  BalanceOptions o = with(BalanceMethod::kNone);
  o.window = 4;
  o.alarm_steps = 3;
  o.alarm_max_vio = 2.5;
  o.alarm_entropy = 0.1;
  const Tensor bias = at::zeros({8});
  Balancer balancer(o);
  balancer.add_layer("layer", bias, 1);
  const Tensor even = at::arange(64) % 8, collapsed = at::zeros({64}, at::kLong);
  const auto report = [&](const Tensor& experts) {
    balancer.begin_step();
    balancer.observe(0, experts.view({64, 1}), at::zeros({64, 8}), at::zeros({64}));
    return balancer.end_step(64);
  };
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(report(even).alarms.empty());
  std::vector<size_t> alarms;
  std::vector<bool> remind;
  std::vector<std::string> last;
  for (int i = 0; i < 24; ++i) {
    const BalanceReport r = report(collapsed);
    alarms.push_back(r.alarms.size());
    remind.push_back(r.remind);
    last = r.alarms;
  }
  // MaxVio passes 2.5 at the second collapsed step, so three in a row are over at index 3, six at index 6;
  // the experts are dead for four steps at index 3, and three in a row at index 5.
  EXPECT_EQ((std::vector<size_t>(alarms.begin(), alarms.begin() + 8)),
            (std::vector<size_t>{0, 0, 0, 1, 1, 2, 2, 2}));
  EXPECT_EQ((std::vector<bool>(remind.begin(), remind.begin() + 8)),
            (std::vector<bool>{false, false, false, true, false, true, true, false}));
  // The even steps fade from the window: in the end its entropy is too small as well.
  ASSERT_EQ(last.size(), 3u);
  EXPECT_THAT(last[0], HasSubstr("layer: MaxVio"));
  EXPECT_THAT(last[1], HasSubstr("7 of 8 experts without a token in the last 4 steps"));
  EXPECT_THAT(last[2], HasSubstr("layer: the router has collapsed: entropy 0.0"));
  int still = -1;
  for (int i = 0; i < 12; ++i) {
    if (!report(even).alarms.empty()) still = i;
  }
  EXPECT_LT(still, 4);
}

TEST(Balance, StateResumesBitForBit) {
  at::manual_seed(6);
  std::vector<Tensor> batches;
  for (int i = 0; i < 6; ++i) batches.push_back(at::randn({64, 8}));
  BalanceOptions o;
  o.window = 3;
  const Tensor bias = at::zeros({8});
  Balancer a(o);
  a.add_layer("layer", bias, 2);
  for (int i = 0; i < 3; ++i) step(a, batches[i], bias, 2);
  StateMap saved = collect_state([&](const StateVisitor& v) { a.for_each_state(v); });
  for (auto& [name, tensor] : saved) tensor = tensor.clone();
  const Tensor resumed = bias.clone();
  Balancer b(o);
  b.add_layer("layer", resumed, 2);
  b.load_state(saved);
  for (int i = 3; i < 6; ++i) {
    const LayerBalance one = step(a, batches[i], bias, 2), two = step(b, batches[i], resumed, 2);
    EXPECT_EQ(one.windowed_max_vio, two.windowed_max_vio);
    EXPECT_EQ(one.flip_rate, two.flip_rate);
    EXPECT_TRUE(bit_equal(resumed, bias));
  }
  saved.erase("layer.idle_steps");
  EXPECT_THROW(b.load_state(saved), Error);
}

// ---- loss terms
// ---------------------------------------------------------------------------------------------

BalanceOptions aux_options() {
  BalanceOptions o = with(BalanceMethod::kAuxLoss);
  o.aux_coefficient = 0.5;
  o.entropy_regularisation = 0.25;
  return o;
}

// The formulas of the header, one document at a time.
double written_out(const BalanceOptions& o, const Tensor& logits, const Tensor& experts, const Tensor& cu,
                   int64_t batch_tokens) {
  double total = 0;
  const auto width = static_cast<double>(logits.size(1)), k = static_cast<double>(experts.size(1));
  for (int64_t d = 0; d + 1 < cu.size(0); ++d) {
    const auto begin = cu[d].item<int64_t>(), tokens = cu[d + 1].item<int64_t>() - begin;
    if (tokens == 0) continue;
    const Tensor s = at::sigmoid(logits.narrow(0, begin, tokens));
    const Tensor mean = (s / s.sum(1, true)).mean(0);
    const Tensor f = loads(experts.narrow(0, begin, tokens), logits.size(1)) * (width / k / tokens);
    const double aux = (f * mean).sum().item<double>();
    const double entropy = std::log(width) + (mean * mean.log()).sum().item<double>();
    total += (o.aux_coefficient * aux + o.entropy_regularisation * entropy) * tokens / batch_tokens;
  }
  return total;
}

TEST(BalanceLoss, MatchesTheFormulasPerDocument) {
  at::manual_seed(7);
  const Tensor logits = at::randn({20, 6}, at::kDouble), cu = at::tensor({0, 5, 5, 6, 20}, at::kLong);
  const Tensor experts = route(logits, at::zeros({6}, at::kDouble), 2).experts;
  const Tensor loss = balance_loss(aux_options(), logits, experts, cu, 40);
  EXPECT_NEAR(loss.item<double>(), written_out(aux_options(), logits, experts, cu, 40), test::kFp64);
  // Packed = separate.
  double separate = 0;
  for (const auto& [begin, tokens] : {std::pair{0, 5}, {5, 1}, {6, 14}})
    separate += balance_loss(aux_options(), logits.narrow(0, begin, tokens), experts.narrow(0, begin, tokens),
                             at::tensor({0, tokens}, at::kLong), 40)
                    .item<double>();
  EXPECT_NEAR(loss.item<double>(), separate, test::kFp64);
}

TEST(BalanceLoss, GradientMatchesFiniteDifferences) {
  at::manual_seed(8);
  Tensor logits = at::randn({6, 4}, at::kDouble);
  const Tensor cu = at::tensor({0, 4, 6}, at::kLong);
  const Tensor experts = route(logits, at::zeros({4}, at::kDouble), 2).experts;
  logits.requires_grad_(true);
  balance_loss(aux_options(), logits, experts, cu, 6).backward();
  const Tensor base = logits.detach().clone(), numeric = at::zeros_like(base);
  constexpr double kStep = 1e-6;
  for (int64_t i = 0; i < base.numel(); ++i) {
    Tensor plus = base.clone(), minus = base.clone();
    plus.view(-1)[i] += kStep;
    minus.view(-1)[i] -= kStep;
    numeric.view(-1)[i] = (balance_loss(aux_options(), plus, experts, cu, 6) -
                           balance_loss(aux_options(), minus, experts, cu, 6)) /
                          (2 * kStep);
  }
  EXPECT_TRUE(close(logits.grad(), numeric, test::kFiniteDiff));
}

// Small scores must not pay: shifting every logit far down changes nothing (as long as exp(logit) keeps its
// ratio).
TEST(BalanceLoss, ShrinkingAllScoresGainsNothing) {
  at::manual_seed(9);
  const Tensor logits = at::randn({16, 4}) - 20, cu = at::tensor({0, 16}, at::kLong);
  const Tensor experts = route(logits, at::zeros({4}), 1).experts;
  const Tensor a = balance_loss(aux_options(), logits, experts, cu, 16);
  const Tensor b = balance_loss(aux_options(), logits - 100, experts, cu, 16);  // sigmoid underflows in fp32
  EXPECT_TRUE(close(b, a, test::kFp32Chain));
}

TEST(BalanceLoss, IsAbsentWhereNothingAsksForIt) {
  const Tensor logits = at::randn({3, 4}), experts = at::zeros({3, 1}, at::kInt),
               cu = at::tensor({0, 3}, at::kLong);
  EXPECT_FALSE(balance_loss({}, logits, experts, cu, 3).defined());
  EXPECT_FALSE(balance_loss(aux_options(), at::zeros({0, 4}), at::zeros({0, 1}, at::kInt),
                            at::zeros({1}, at::kLong), 3)
                   .defined());
}

}  // namespace
}  // namespace godwit
