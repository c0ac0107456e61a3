#include "godwit/rl/policy_step.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "godwit/model/checkpoint.h"
#include "godwit/model/forward.h"
#include "godwit/rl/replay.h"
#include "godwit/rl/rollout.h"
#include "tests/rl/tiny_policy.h"
#include "tests/support/compare.h"
#include "tests/support/files.h"

namespace godwit::rl {
namespace {

RolloutOptions options() {
  test::register_chatter();
  RolloutOptions o;
  o.environments = {{.name = "chatter"}};
  o.groups = 2;
  o.samples = 3;
  o.turn_tokens = 30;
  o.context = 300;
  o.concurrent = 6;
  o.temperature = 0.8;
  return o;
}

std::vector<PolicySample> samples_of(const std::vector<std::vector<Trajectory>>& groups) {
  std::vector<PolicySample> out;
  double a = -1;
  for (const auto& group : groups) {
    for (const Trajectory& t : group) {
      out.push_back({.trajectory = &t, .advantages = {}});
      for (size_t k = 0; k < t.turns.size(); ++k) out.back().advantages.push_back(a += 0.37);
    }
  }
  return out;
}

StateMap gradients(LoadedModel& model) {
  StateMap out;
  for_each_param(model.config, model.weights, [&](const ParamInfo& info, at::Tensor& value) {
    if (value.grad().defined()) out.emplace(info.name, value.grad().clone());
  });
  return out;
}

PolicyStepOptions step_options() {
  PolicyStepOptions o;
  o.temperature = 0.8;
  o.objective.tau = 0.1;
  return o;
}

// The gradient through whole logits, one trajectory at a time, from the chunked forward's own
// log-probabilities.
StateMap plain_gradients(LoadedModel& model, const std::vector<PolicySample>& samples,
                         const ObjectiveOptions& o) {
  const at::Tensor forbidden = rollout_forbidden(model);
  int64_t all = 0;
  for (const PolicySample& s : samples) all += s.trajectory->drawn();
  std::vector<at::Tensor> losses;
  for (const PolicySample& s : samples) {
    const Trajectory& t = *s.trajectory;
    const at::Tensor ids = at::tensor(std::vector<int64_t>(t.ids.begin(), t.ids.end()), at::kLong);
    const PackedBatch batch{.ids = ids, .cu_seqlens = make_cu_seqlens({ids.size(0)})};
    const at::Tensor logits = at::linear(forward_hidden(model.config, model.weights, batch),
                                         head_weight(model.config, model.weights))
                                  .to(at::kDouble) /
                              0.8;
    const at::Tensor logp = at::log_softmax(logits.masked_fill(forbidden, -INFINITY), -1);
    for (size_t k = 0; k < t.turns.size(); ++k) {
      for (int64_t at = t.turns[k].begin; at < t.turns[k].end; ++at) {
        const at::Tensor d = logp[at - 1][t.ids[at]] - t.logp[at];
        losses.push_back((-d.exp() * s.advantages[k] + o.tau * d * d) / static_cast<double>(all));
      }
    }
  }
  at::stack(losses).sum().backward();
  return gradients(model);
}

void expect_close(const StateMap& a, const StateMap& b, double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, grad] : a) EXPECT_TRUE(test::close(grad, b.at(name), tolerance)) << name;
}

TEST(PolicyStep, GradientIsThatOfThePlainLossHoweverItIsCut) {
  LoadedModel model = test::tiny_policy(3);
  const auto groups = Rollouts(model, options()).run(0);
  const auto samples = samples_of(groups);
  PolicyStepOptions o = step_options();
  PolicyStep step(model, o);
  const PolicyStepResult whole = step.backward(samples, 0);
  const StateMap deterministic = gradients(model);
  EXPECT_EQ(whole.max_dlogp, 0);
  EXPECT_GT(whole.present_tokens, 50);
  EXPECT_EQ(static_cast<double>(whole.present_tokens), whole.stats.tokens);
  EXPECT_EQ(whole.stats.max_delta, 0);
  // Two orders of fp32 rounding in a model with weights ten times the usual scale.
  EXPECT_LT(whole.mean_drift, 1e-5);
  EXPECT_GT(whole.mean_drift, 0);

  for_each_param(model.config, model.weights,
                 [](const ParamInfo&, at::Tensor& value) { value.mutable_grad() = at::Tensor(); });
  const StateMap plain = plain_gradients(model, samples, o.objective);
  // On-policy tokens have ratio 1 in one and 1 + rounding in the other.
  expect_close(deterministic, plain, test::kFp32Model);

  o.micro_batch_tokens = 1;
  o.recompute = true;
  PolicyStep cut(model, o);
  cut.backward(samples, 0);
  expect_close(gradients(model), deterministic, test::kFp32Grad);

  o.deterministic = false;
  PolicyStep fast(model, o);
  const PolicyStepResult quick = fast.backward(samples, 0);
  EXPECT_GT(quick.max_dlogp, 0);
  EXPECT_LT(quick.max_dlogp, 1e-3);
  expect_close(gradients(model), plain, test::kFp32Model);
}

TEST(PolicyStep, ADifferenceBetweenRolloutAndTrainerStopsTheStep) {
  LoadedModel model = test::tiny_policy(3);
  auto groups = Rollouts(model, options()).run(0);
  PolicyStep step(model, step_options());
  Trajectory& t = groups[1][2];
  const int64_t at = t.turns[0].begin;
  t.logp[at] += 1e-15 + std::abs(t.logp[at]) * 3e-16;
  const auto samples = samples_of(groups);
  godwit::testing::expect_error([&] { step.run(samples, 0, 1); }, {"differ at token " + std::to_string(at),
                                                                   "sample 2", "group 1", "deterministic"});
  // The token is of an older version: no promise.
  EXPECT_NO_THROW(step.backward(samples, 1));

  PolicyStepOptions loose = step_options();
  loose.deterministic = false;
  loose.max_mean_dlogp = 1e-2;
  PolicyStep fast(model, loose);
  EXPECT_NO_THROW(fast.backward(samples, 0));
  for (double& logp : t.logp) logp *= 1.5;
  godwit::testing::expect_error([&] { fast.run(samples_of(groups), 0, 1); }, {"more than the bound"});
}

// Every trajectory longer than a segment: the same gradient, the same numerics.
TEST(PolicyStep, SegmentsChangeNothing) {
  LoadedModel model = test::tiny_policy(3);
  const auto groups = Rollouts(model, options()).run(0);
  const auto samples = samples_of(groups);
  int64_t longest = 0;
  for (const PolicySample& s : samples)
    longest = std::max(longest, static_cast<int64_t>(s.trajectory->ids.size()));
  ASSERT_GT(longest, 128);
  PolicyStepOptions o = step_options();
  const PolicyStepResult whole = PolicyStep(model, o).backward(samples, 0);
  const StateMap expected = gradients(model);
  o.segment_tokens = 64;
  const PolicyStepResult cut = PolicyStep(model, o).backward(samples, 0);
  EXPECT_EQ(cut.max_dlogp, 0);
  EXPECT_EQ(cut.stats.tokens, whole.stats.tokens);
  EXPECT_NEAR(cut.loss, whole.loss, 1e-12);  // sums of the same fp64 terms
  expect_close(gradients(model), expected, test::kFp32Model);
  o.deterministic = false;
  const PolicyStepResult fast = PolicyStep(model, o).backward(samples, 0);
  EXPECT_GT(fast.max_dlogp, 0);
  EXPECT_LT(fast.max_dlogp, 1e-3);
  expect_close(gradients(model), expected, test::kFp32Model);
}

// Quantisation-aware: rollout and trainer read weights that MXFP4 can say, steps too small for its grid add
// up in the masters, and packing the result as `convert` does changes no logit.
TEST(PolicyStep, ExpertsAreWhatMxfp4CanSay) {
  LoadedModel model = test::tiny_policy(3, 6, /*expert_width=*/32);
  PolicyStepOptions o = step_options();
  o.mxfp4_experts = true;
  o.optimizer.muon_lr = o.optimizer.adamw_lr = 1e-3;
  PolicyStep step(model, o);
  StateMap before = collect_state([&](const StateVisitor& visit) { step.for_each_state(visit); });
  for (auto& [name, value] : before) value = value.clone();
  StateMap rounded;
  const auto experts = [&](const auto& visit) {
    for_each_param(model.config, model.weights, [&](const ParamInfo& info, at::Tensor& value) {
      if (info.role == ParamRole::kExperts) visit(info.name, value);
    });
  };
  experts([&](const std::string& name, const at::Tensor& value) {
    rounded.emplace(name, value.detach().clone());
  });
  Rollouts rollouts(model, options());
  for (int64_t version = 0; version < 3; ++version) {
    const auto groups = rollouts.run(version);
    EXPECT_EQ(step.run(samples_of(groups), version, 1).max_dlogp, 0);
  }
  const StateMap after = collect_state([&](const StateVisitor& visit) { step.for_each_state(visit); });
  int64_t same = 0, all = 0;
  experts([&](const std::string& name, const at::Tensor& value) {
    EXPECT_FALSE(test::bit_equal(after.at("master." + name), before.at("master." + name))) << name;
    same += value.eq(rounded.at(name)).sum().item<int64_t>();
    all += value.numel();
  });
  EXPECT_GT(same, all / 2);  // most steps are smaller than the grid
  EXPECT_LT(same, all);

  const godwit::testing::ScratchDir dir;
  save_weights(model.config, model.weights, dir.path());
  model.tokenizer.save(dir.path());
  const LoadedModel packed =
      load_model(std::string(dir.path()), at::kCPU, at::kFloat, weight_format_of("mxfp4"));
  const at::NoGradGuard no_grad;
  const PackedBatch batch{.ids = at::arange(0, 40, at::kLong), .cu_seqlens = make_cu_seqlens({40})};
  EXPECT_TRUE(test::bit_equal(forward_logits(packed.config, packed.weights, batch),
                              forward_logits(model.config, model.weights, batch)));
}

TEST(PolicyStep, NothingToLearnChangesNothing) {
  LoadedModel model = test::tiny_policy(3);
  const at::Tensor before = model.weights.embed.clone();
  PolicyStep step(model, step_options());
  const PolicyStepResult r = step.run({}, 0, 1);
  EXPECT_EQ(r.stats.tokens, 0);
  EXPECT_TRUE(test::bit_equal(model.weights.embed.detach(), before));
}

}  // namespace
}  // namespace godwit::rl
