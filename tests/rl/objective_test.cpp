#include "godwit/rl/objective.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <functional>
#include <limits>
#include <map>

#include "tests/support/files.h"

namespace godwit::rl {
namespace {

using Values = std::vector<double>;

// Three sequences in two groups with masked tokens between (tool output), ratios on both sides of every band
// and advantages of both signs.
struct Example {
  Values logp = {-0.5, -1.2, -9.0, -2.0, -0.1, -3.0, -1.0, -0.7, -2.5, -1.5, -0.3};
  Values behaviour = {-0.6, -1.1, -1.0, -1.1, -0.9, -3.0, -1.05, -0.95, -2.0, -1.4, -2.0};
  Values old = {-0.55, -1.3, -4.0, -1.9, -0.3, -3.1, -1.2, -0.9, -2.3, -1.5, -0.6};
  Values reference = {-0.4, -1.0, -2.0, -2.2, -0.2, -2.0, -1.1, -0.8, -2.4, -1.7, -0.5};
  Values advantage = {1.0, 1.0, 7.0, -0.5, -0.5, -0.5, 0.25, 2.0, 2.0, -1.5, -1.5};
  std::vector<int64_t> sequence = {0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2};
  std::vector<uint8_t> mask = {1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1};
  std::vector<int64_t> group = {4, 4, 7};

  [[nodiscard]] PolicyBatch batch(const ObjectiveOptions& options) const {
    const auto real = [](const Values& v) { return at::tensor(v, at::kDouble); };
    PolicyBatch b{.logp = real(logp).set_requires_grad(true),
                  .behaviour = real(behaviour),
                  .old = real(old),
                  .reference = real(reference),
                  .advantage = real(advantage),
                  .mask = at::tensor(std::vector<int64_t>(mask.begin(), mask.end()), at::kLong).to(at::kBool),
                  .sequence = at::tensor(sequence, at::kLong),
                  .weight = {},
                  .entropy = {}};
    b.weight = token_weights(options, b.mask, b.sequence, group);
    return b;
  }
};

// The loss written out with scalars. `frozen` is log pi_theta where a stop-gradient holds it.
double written_out(const ObjectiveOptions& o, const Example& e, const Values& theta, const Values& frozen) {
  std::map<int64_t, double> length, sum, group_tokens, group_sequences;
  double all = 0;
  for (size_t i = 0; i < theta.size(); ++i) {
    if (!e.mask[i]) continue;
    length[e.sequence[i]] += 1;
    sum[e.sequence[i]] += theta[i] - e.old[i];
    group_tokens[e.group[e.sequence[i]]] += 1;
    all += 1;
  }
  for (const int64_t g : e.group) group_sequences[g] += 1;
  const auto clamp = [](double x, double low, double high) { return x < low ? low : (x > high ? high : x); };
  double total = 0;
  for (size_t i = 0; i < theta.size(); ++i) {
    if (!e.mask[i]) continue;
    const int64_t s = e.sequence[i], g = e.group[s];
    const double a = e.advantage[i];
    double ratio = std::exp(theta[i] - e.old[i]);
    if (o.objective == Objective::kGspo) ratio = std::exp(sum[s] / length[s]);
    double l = 0;
    if (o.objective == Objective::kClipBand) {
      l = -clamp(std::exp(theta[i] - e.behaviour[i]), o.ratio_min, o.ratio_max) * a;
    } else if (o.objective == Objective::kCispo) {
      l = -clamp(std::exp(frozen[i] - e.old[i]), 1 - o.clip_low, 1 + o.clip_high) * a * theta[i];
    } else {
      l = -std::min(ratio * a, clamp(ratio, 1 - o.clip_low, 1 + o.clip_high) * a);
    }
    const double correction = std::exp(e.old[i] - e.behaviour[i]);
    if (o.correction == Correction::kWeight) l *= correction;
    if (o.correction == Correction::kTruncate) l *= std::min(correction, o.correction_max);
    if (o.correction == Correction::kMask)
      l *= correction < o.correction_min || correction > o.correction_max ? 0 : correction;
    l += o.tau * std::pow(theta[i] - e.behaviour[i], 2);
    const double d = e.reference[i] - theta[i];
    l += o.kl * (std::exp(d) - d - 1);
    double divisor = all;
    if (o.mean == TokenMean::kGroupTokens) divisor = 2 * group_tokens[g];
    if (o.mean == TokenMean::kSequences) divisor = 2 * group_sequences[g] * length[s];
    if (o.mean == TokenMean::kConstant) divisor = 2 * group_sequences[g] * o.constant_tokens;
    total += l / divisor;
  }
  return total;
}

void expect_matches(const ObjectiveOptions& o, const Example& e) {
  const PolicyBatch b = e.batch(o);
  const PolicyLoss out = policy_loss(o, b);
  EXPECT_NEAR(out.loss.item<double>(), written_out(o, e, e.logp, e.logp), 1e-13);
  const at::Tensor grad = torch::autograd::grad({out.loss}, {b.logp})[0];
  for (size_t i = 0; i < e.logp.size(); ++i) {
    constexpr double kStep = 1e-6;
    Values up = e.logp, down = e.logp;
    up[i] += kStep;
    down[i] -= kStep;
    const double numeric = (written_out(o, e, up, e.logp) - written_out(o, e, down, e.logp)) / (2 * kStep);
    // fp64 central differences of values near 1: about 1e-16 / 1e-6.
    EXPECT_NEAR(grad[static_cast<int64_t>(i)].item<double>(), numeric, 2e-9) << "token " << i;
  }
}

TEST(Objective, EachMatchesTheWrittenOutLossAndItsDifferences) {
  for (const Objective objective : {Objective::kClipBand, Objective::kGrpo, Objective::kDrGrpo,
                                    Objective::kDapo, Objective::kCispo, Objective::kDecoupled}) {
    SCOPED_TRACE(static_cast<int>(objective));
    expect_matches(default_options(objective), Example());
  }
}

TEST(Objective, SequenceRatio) {
  ObjectiveOptions o = default_options(Objective::kGspo);
  Example e;
  // The gradient of the sequence's ratio is shared by its tokens where they have one advantage.
  e.advantage = {1, 1, 1, -0.5, -0.5, -0.5, -0.5, 2, 2, 2, 2};
  expect_matches(o, e);
  o.clip_low = o.clip_high = 0.9;  // nothing clipped
  expect_matches(o, e);
}

TEST(Objective, CorrectionsByTheTrainersOldPolicy) {
  for (const Correction correction : {Correction::kWeight, Correction::kTruncate, Correction::kMask}) {
    for (const Objective objective : {Objective::kGrpo, Objective::kCispo}) {
      ObjectiveOptions o = default_options(objective);
      o.correction = correction;
      o.correction_min = 0.9;
      o.correction_max = 1.1;
      expect_matches(o, Example());
    }
  }
}

TEST(Objective, RegularisersAddToEveryObjective) {
  ObjectiveOptions o = default_options(Objective::kGrpo);
  o.tau = 0.3;
  o.kl = 0.7;
  expect_matches(o, Example());
}

TEST(Objective, OutsideTheBandThereIsNoPolicyGradientWhateverTheSign) {
  Example e;
  e.logp = {-0.1, -0.1, 0, -5, -5, 0, -1.05, -0.95, -2, -1.4, -2};
  e.behaviour = {-2, -2, 0, -1, -1, 0, -1.05, -0.95, -2, -1.4, -2};
  e.advantage = {1, -1, 0, 1, -1, 0, 1, 1, 1, 1, 1};
  ObjectiveOptions o;
  o.tau = 0;
  const PolicyBatch b = e.batch(o);
  const PolicyLoss out = policy_loss(o, b);
  const at::Tensor grad = torch::autograd::grad({out.loss}, {b.logp})[0];
  for (const int64_t i : {0, 1, 3, 4}) EXPECT_EQ(grad[i].item<double>(), 0.0) << i;
  EXPECT_NEAR(grad[6].item<double>(), -1.0 / 9, 1e-15);
  EXPECT_EQ(out.stats.cut, 4);
}

// A tool's output may be larger than what the model wrote, and nothing of it may count.
TEST(Objective, AHugeObservationHasExactlyNoInfluence) {
  for (const Objective objective :
       {Objective::kClipBand, Objective::kGrpo, Objective::kDrGrpo, Objective::kDapo, Objective::kGspo,
        Objective::kCispo, Objective::kDecoupled}) {
    const ObjectiveOptions o = default_options(objective);
    const Example small;
    Example huge;
    for (int i = 0; i < 5000; ++i) {
      const double bad = i % 3 == 0 ? -1e30
                                    : (i % 3 == 1 ? std::numeric_limits<double>::quiet_NaN()
                                                  : -std::numeric_limits<double>::infinity());
      for (Values* v : {&huge.logp, &huge.behaviour, &huge.old, &huge.reference, &huge.advantage})
        v->insert(v->begin() + 2, bad);
      huge.sequence.insert(huge.sequence.begin() + 2, 0);
      huge.mask.insert(huge.mask.begin() + 2, 0);
    }
    const PolicyBatch a = small.batch(o), b = huge.batch(o);
    const PolicyLoss la = policy_loss(o, a), lb = policy_loss(o, b);
    EXPECT_EQ(la.loss.item<double>(), lb.loss.item<double>());
    EXPECT_EQ(la.stats.tokens, lb.stats.tokens);
    EXPECT_EQ(la.stats.abs_delta, lb.stats.abs_delta);
    EXPECT_EQ(la.stats.k3, lb.stats.k3);
    EXPECT_EQ(la.stats.cut, lb.stats.cut);
    const at::Tensor ga = torch::autograd::grad({la.loss}, {a.logp})[0];
    const at::Tensor gb = torch::autograd::grad({lb.loss}, {b.logp})[0];
    EXPECT_TRUE(gb.slice(0, 2, 5002).eq(0).all().item<bool>());
    EXPECT_TRUE(at::cat({gb.slice(0, 0, 2), gb.slice(0, 5002)}).equal(ga));
  }
}

TEST(Objective, CutIntoMicroBatchesItAddsUp) {
  const ObjectiveOptions o;
  const Example e;
  const PolicyBatch whole = e.batch(o);
  double sum = 0;
  PolicyStats stats;
  for (const auto& [from, to] : std::vector<std::pair<int64_t, int64_t>>{{0, 3}, {3, 3}, {3, 11}}) {
    const auto part = [&, from = from, to = to](const at::Tensor& x) { return x.slice(0, from, to); };
    const PolicyLoss out = policy_loss(o, {.logp = part(whole.logp),
                                           .behaviour = part(whole.behaviour),
                                           .old = {},
                                           .reference = {},
                                           .advantage = part(whole.advantage),
                                           .mask = part(whole.mask),
                                           .sequence = part(whole.sequence),
                                           .weight = part(whole.weight),
                                           .entropy = {}});
    sum += out.loss.item<double>();
    stats.add(out.stats);
  }
  const PolicyLoss out = policy_loss(o, whole);
  EXPECT_NEAR(sum, out.loss.item<double>(), 1e-14);
  EXPECT_EQ(stats.tokens, 9);
  EXPECT_NEAR(stats.abs_delta, out.stats.abs_delta, 1e-14);
  EXPECT_EQ(stats.max_delta, out.stats.max_delta);
}

TEST(Objective, Statistics) {
  Example e;
  e.sequence.assign(e.sequence.size(), 0);
  e.group = {0};
  e.mask = {1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1};  // deltas 0.1, -0.1, 1.7
  const ObjectiveOptions o;
  PolicyBatch b = e.batch(o);
  b.entropy = at::full({11}, 0.5, at::kDouble);
  const PolicyStats s = policy_loss(o, b).stats;
  EXPECT_EQ(s.tokens, 3);
  EXPECT_NEAR(s.mean(s.abs_delta), 1.9 / 3, 1e-14);
  EXPECT_NEAR(s.max_delta, 1.7, 1e-14);
  EXPECT_NEAR(s.k3, std::exp(0.1) - 1.1 + std::exp(-0.1) - 0.9 + std::exp(1.7) - 2.7, 1e-13);
  EXPECT_EQ(s.over_ln2, 1);
  EXPECT_EQ(s.cut, 1);
  EXPECT_NEAR(s.mean(s.entropy), 0.5, 1e-15);
  const double r[3] = {std::exp(0.1), std::exp(-0.1), std::exp(1.7)};
  EXPECT_NEAR(s.effective_share(),
              std::pow(r[0] + r[1] + r[2], 2) / (3 * (r[0] * r[0] + r[1] * r[1] + r[2] * r[2])), 1e-13);
}

TEST(Objective, RatiosFarOutStayFinite) {
  Example e;
  e.logp[0] = -3000;
  e.behaviour[1] = -3000;
  for (const Objective objective :
       {Objective::kClipBand, Objective::kGrpo, Objective::kGspo, Objective::kCispo, Objective::kDecoupled}) {
    const ObjectiveOptions o = default_options(objective);
    const PolicyBatch b = e.batch(o);
    const at::Tensor grad = torch::autograd::grad({policy_loss(o, b).loss}, {b.logp})[0];
    EXPECT_TRUE(at::isfinite(grad).all().item<bool>());
  }
}

TEST(Objective, SaysWhatIsWrong) {
  const ObjectiveOptions o;
  const Example e;
  PolicyBatch b = e.batch(o);
  b.advantage = b.advantage.slice(0, 1);
  godwit::testing::expect_error([&] { policy_loss(o, b); }, {"advantage", "10", "11"});
  b = e.batch(o);
  b.behaviour = b.behaviour.clone();
  b.behaviour[1] = std::numeric_limits<double>::quiet_NaN();
  godwit::testing::expect_error([&] { policy_loss(o, b); }, {"behaviour", "finite"});
  ObjectiveOptions kl = o;
  kl.kl = 1;
  b = e.batch(o);
  b.reference = at::Tensor();
  godwit::testing::expect_error([&] { policy_loss(kl, b); }, {"reference"});
}

}  // namespace
}  // namespace godwit::rl
