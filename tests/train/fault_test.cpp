// Steps that go wrong, and runs whose experts collapse: what is injected is named, and the recipe's policy
// follows.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "godwit/base/file.h"
#include "tests/train/tiny_run.h"

namespace godwit {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Fault = test::TinyRun;

// A weight of layer 1 that is not finite at `step`, and whole again at the step after.
struct Poison {
  int64_t step = 5;
  bool once = false;  // only the first time that the step comes
  bool done = false;
  at::Tensor saved = {};

  void operator()(int64_t at, ModelWeights& weights) {
    const at::NoGradGuard no_grad;
    at::Tensor weight = weights.layers[1].kda->q_proj;
    if (saved.defined()) weight.copy_(saved);
    saved.reset();
    if (at != step || done) return;
    saved = weight.clone();
    weight.view({-1})[3].fill_(NAN);
    done = once;
  }
};

TEST_F(Fault, NotFiniteStopsTheRunAndNamesStepLayerAndTensor) {
  const std::string message = error_of(recipe("run", {"checkpoint.every=2"}), {.before_step = Poison{}});
  EXPECT_THAT(message,
              AllOf(HasSubstr("step 5 (stage short)"), HasSubstr("layer 1"),
                    HasSubstr("model.layers.1.self_attn.q_proj.weight is not finite"), HasSubstr("stopped")));
  EXPECT_TRUE(fs::exists(root_ / "run" / "checkpoints" / "step-4"));
  EXPECT_EQ(metrics("run").size(), 4u);
}

TEST_F(Fault, TheFirstLayerThatOverflowsIsNamed) {
  // Every weight is finite: the norm of layer 2 is so large that its output is not.
  const auto inflate = [](int64_t step, ModelWeights& weights) {
    const at::NoGradGuard no_grad;
    if (step == 3) weights.layers[1].post_norm.fill_(3e38);
  };
  EXPECT_THAT(error_of(recipe("run"), {.before_step = inflate}),
              AllOf(HasSubstr("step 3"), HasSubstr("the output of layer 1 is not finite")));
}

TEST_F(Fault, ABadGradientIsNamed) {
  const auto spoil = [](int64_t step, ModelWeights& weights) {
    if (step == 4)
      weights.layers[2].mla->kv_b.register_hook([](const at::Tensor& grad) { return grad * INFINITY; });
  };
  EXPECT_THAT(error_of(recipe("run"), {.before_step = spoil}),
              AllOf(HasSubstr("step 4"), HasSubstr("the gradient of"),
                    HasSubstr("layers.2.self_attn.kv_b_proj.weight is not finite")));
}

TEST_F(Fault, ASkippedStepHasItsRowAndChangesNothing) {
  const RunSummary s = run_training(recipe("run", {"train.nan_policy=skip"}), {.before_step = Poison{}});
  EXPECT_TRUE(s.finished);
  const auto rows = metrics("run");
  ASSERT_EQ(rows.size(), 18u);
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i].at("step"), i + 1);
    EXPECT_EQ(rows[i].contains("skipped"), i == 4) << i;
    EXPECT_EQ(rows[i].at("loss").is_null(), i == 4) << i;
  }
  EXPECT_THAT(rows[4].at("skipped").get<std::string>(), HasSubstr("model.layers.1.self_attn.q_proj.weight"));
  EXPECT_LT(s.after.nats_per_token, s.before.nats_per_token - 1.0);
}

TEST_F(Fault, TooManySkippedStepsInARowStopTheRun) {
  const auto ruin = [](int64_t step, ModelWeights& weights) {
    const at::NoGradGuard no_grad;
    if (step == 3) weights.layers[0].kda->k_proj.fill_(NAN);  // and it stays so
  };
  EXPECT_THAT(
      error_of(recipe("run", {"train.nan_policy=skip", "train.fault_limit=4"}), {.before_step = ruin}),
      AllOf(HasSubstr("step 6"), HasSubstr("4 such steps in a row")));
}

TEST_F(Fault, RollBackGoesPastTheBadBatches) {
  const std::vector<std::string> options = {"train.nan_policy=roll_back", "checkpoint.every=3",
                                            "checkpoint.keep=0"};
  const RunSummary s = run_training(recipe("run", options), {.before_step = Poison{.step = 5, .once = true}});
  EXPECT_TRUE(s.finished);
  const auto rows = metrics("run");
  ASSERT_EQ(rows.size(), 18u);
  for (size_t i = 0; i < rows.size(); ++i) EXPECT_EQ(rows[i].at("step"), i + 1);
  // From the checkpoint of step 3 the batches 3 and 4 (the bad one) are passed over: step 4 sees batch 5.
  run_training(recipe("plain", options), {});
  const auto plain = metrics("plain");
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(rows[i].at("loss"), plain[i].at("loss")) << i;
  EXPECT_NE(rows[3].at("loss"), plain[3].at("loss"));
  const auto position = nlohmann::json::parse(read_file(root_ / "run/checkpoints/step-12/checkpoint.json"));
  EXPECT_EQ(position.at("position").at("passed_over"), (std::vector<int64_t>{2, 0}));
}

TEST_F(Fault, ReturnsToOneCheckpointAreBounded) {
  const auto always = [](int64_t step, ModelWeights& weights) {
    const at::NoGradGuard no_grad;
    if (step == 2) weights.embed.fill_(NAN);
  };
  EXPECT_THAT(
      error_of(recipe("run", {"train.nan_policy=roll_back", "train.fault_limit=3"}), {.before_step = always}),
      AllOf(HasSubstr("step 2"), HasSubstr("3 returns to one checkpoint")));
}

TEST_F(Fault, ALossSpikeIsSkippedAndNamesTheGradientThatGrew) {
  at::Tensor saved;
  const auto shake = [&](int64_t step, ModelWeights& weights) {
    const at::NoGradGuard no_grad;
    if (step == 24) saved = weights.lm_head.clone(), weights.lm_head.copy_(saved.flip(0).mul(100));
    if (step == 25) weights.lm_head.copy_(saved);
  };
  const std::vector<std::string> options = {"stage.0.steps=26", "stage.1.steps=2", "train.spike_nats=1.0"};
  const RunSummary s = run_training(recipe("run", options), {.before_step = shake});
  EXPECT_TRUE(s.finished);
  const auto rows = metrics("run");
  ASSERT_EQ(rows.size(), 28u);
  for (size_t i = 0; i < rows.size(); ++i) EXPECT_EQ(rows[i].contains("skipped"), i == 23) << i;
  EXPECT_THAT(
      rows[23].at("skipped").get<std::string>(),
      AllOf(HasSubstr("above that of the last steps"), HasSubstr("has grown most"), HasSubstr(".weight")));
  std::vector<std::string> stop = options;
  stop.push_back("train.spike_policy=stop");
  EXPECT_THAT(error_of(recipe("stopped", stop), {.before_step = shake}),
              AllOf(HasSubstr("step 24 (stage short): the loss is"), HasSubstr("stopped")));
}

// ---- collapse of the router
// ------------------------------------------------------------------------------

int64_t dead_in_last_row(const std::vector<nlohmann::json>& rows) {
  const auto dead = rows.back().at("dead_experts").get<std::vector<int64_t>>();
  return *std::max_element(dead.begin(), dead.end());
}

TEST_F(Fault, ACollapsedRouterRaisesAlarmsAndQuantileBalancingRecoversIt) {
  // The router's rows get a common direction of very different strength: all tokens want the same experts.
  const auto collapse = [](int64_t step, ModelWeights& weights) {
    const at::NoGradGuard no_grad;
    if (step != 1) return;
    for (LayerWeights& layer : weights.layers) {
      if (!layer.moe) continue;
      at::Tensor& bias = layer.moe->router_bias;
      bias.copy_(at::linspace(0, 3, bias.size(0)));
      layer.moe->router.mul_(4);
    }
  };
  const std::vector<std::string> options = {"stage.0.steps=16",
                                            "stage.1.steps=2",
                                            "balance.method=none",
                                            "balance.window=4",
                                            "balance.alarm_steps=3",
                                            "balance.alarm_max_vio=4.0",
                                            "balance.alarm_dead_share=0.25"};
  run_training(recipe("collapsed", options), {.before_step = collapse});
  const auto rows = metrics("collapsed");
  EXPECT_FALSE(rows[1].contains("alarms"));
  ASSERT_TRUE(rows[8].contains("alarms"));
  const std::string alarms = rows[8].at("alarms").dump();
  EXPECT_THAT(alarms, AllOf(HasSubstr("layer 1: MaxVio"), HasSubstr("layer 2: MaxVio"),
                            HasSubstr("experts without a token"), HasSubstr("the router has collapsed")));
  EXPECT_GE(dead_in_last_row(rows), 8);
  // The same weights, balance on.
  std::vector<std::string> on = options;
  on[2] = "balance.method=quantile";
  const std::string model = (root_ / "collapsed" / "model").string();
  on.insert(on.end(), {"init=" + model, "model.name="});
  run_training(recipe("recovered", on), {});
  EXPECT_LE(dead_in_last_row(metrics("recovered")), 1);
  EXPECT_FALSE(metrics("recovered").back().contains("alarms"));
}

}  // namespace
}  // namespace godwit
