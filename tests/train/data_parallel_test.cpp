// Loss, gradients and balance of one global batch do not depend on the number of ranks.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "godwit/io/checkpoint_tensor.h"
#include "godwit/train/setup.h"
#include "godwit/train/step.h"
#include "tests/support/compare.h"
#include "tests/support/ranks.h"
#include "tests/train/tiny_run.h"

namespace godwit {
namespace {

// Rank 1 alone has a weight that is not finite: no rank makes the step, and all know why.
void expect_shared_fault(const Recipe& recipe, dist::Group& group) {
  const RunData data = open_data(recipe);
  const ModelConfig config = resolve_model(recipe, data);
  ModelWeights weights = init_weights(config, 5, at::kCPU, at::kFloat);
  const at::Tensor before = weights.lm_head.clone();
  if (group.rank() == 1) weights.layers[1].kda->q_proj.view({-1})[0].fill_(NAN);
  set_requires_grad(config, weights, true);
  TrainStep step(recipe, config, weights, at::kCPU, group);
  const auto loader = stage_loader(recipe, data, 0);
  const StepResult result = step.run({.config = stage_config(config, recipe.stages[0]), .loader = *loader});
  EXPECT_EQ(result.fault, StepFault::kNotFinite);
  EXPECT_NE(result.what.find("layers.1.self_attn.q_proj.weight"), std::string::npos) << result.what;
  EXPECT_TRUE(at::equal(weights.lm_head.detach(), before));
}

// Results of the first step (at learning rate 0: the weights stay) as named tensors: loss, gradients, biases,
// loads.
io::NamedTensors first_step(const Recipe& recipe, dist::Group& group) {
  const RunData data = open_data(recipe);
  const ModelConfig config = resolve_model(recipe, data);
  const bool bf16 = recipe.train.dtype == TrainDtype::kBf16;
  ModelWeights weights = init_weights(config, 5, at::kCPU, bf16 ? at::kBFloat16 : at::kFloat);
  set_requires_grad(config, weights, true);
  TrainStep step(recipe, config, weights, at::kCPU, group);
  const auto loader = stage_loader(recipe, data, 0);
  const ModelConfig stage = stage_config(config, recipe.stages[0]);
  const StepResult result = step.run({.config = stage, .loader = *loader, .batch = 3, .lr_multiplier = 0});
  EXPECT_EQ(result.fault, StepFault::kNone) << result.what;
  io::NamedTensors out = {{"loss", at::scalar_tensor(result.loss, at::kDouble)},
                          {"max_logit", at::scalar_tensor(result.max_logit, at::kDouble)},
                          {"max_vio", at::scalar_tensor(result.balance.max_vio(), at::kDouble)}};
  for (const auto& [name, grad] : step.gradients())
    if (grad.defined()) out.emplace_back("gradient of " + name, grad.clone());
  for_each_param(config, weights, [&](const ParamInfo& info, at::Tensor& value) {
    if (info.role == ParamRole::kRouterBias) out.emplace_back("bias " + info.name, value.detach().clone());
  });
  return out;
}

std::vector<std::string> options_of_case(const std::string& name) {
  // Small logits limit: QK-Clip acts. Attention residuals, KDA, MLA and experts are all in the tiny model.
  std::vector<std::string> options = {"optimizer.qk_clip=0.05"};
  if (name == "aux") options.push_back("balance.method=aux_loss");
  if (name == "recompute")
    options.insert(options.end(), {"train.recompute=block", "train.micro_batch_tokens=64"});
  if (name == "few") options.push_back("stage.0.batch_tokens=64");  // two sequences: a third rank has none
  return options;
}

TEST(DataParallelRank, Worker) {
  if (!test::is_rank()) GTEST_SKIP() << "started by the next tests";
  const std::filesystem::path root = std::getenv("GODWIT_TEST_DIR");
  dist::Group group(dist::launch_from_environment(), at::kCPU, /*timeout_s=*/60);
  const std::string name = std::getenv("GODWIT_TEST_CASE");
  const Recipe recipe = test::tiny_recipe(root, "unused", options_of_case(name));
  if (name == "fault") {
    expect_shared_fault(recipe, group);
    return group.close();
  }
  const io::NamedTensors got = first_step(recipe, group);
  if (group.root()) io::save_tensors(root / "got.safetensors", got);
  group.close();
}

using DataParallel = test::TinyRun;

// |a - b| / |b| as vectors, in double.
double relative(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.to(at::kDouble), y = b.to(at::kDouble);
  const double size = y.norm().item<double>();
  return (x - y).norm().item<double>() / (size > 0 ? size : 1.0);
}

void expect_close(const io::NamedTensors& got, const io::NamedTensors& want, double limit) {
  ASSERT_EQ(got.size(), want.size());
  std::map<std::string, at::Tensor> by_name(got.begin(), got.end());
  double worst = 0;
  for (const auto& [name, expected] : want) {
    ASSERT_TRUE(by_name.contains(name)) << name;
    const double error = relative(by_name[name], expected);
    EXPECT_LE(error, limit) << name;
    worst = std::max(worst, error);
  }
  std::printf("largest relative difference of %zu tensors: %.2g\n", want.size(), worst);
}

TEST_F(DataParallel, LossEveryGradientAndTheBiasesEqualOneProcess) {
  for (const char* name : {"plain", "aux", "recompute", "few"}) {
    for (const int size : {2, 3}) {
      SCOPED_TRACE(std::string(name) + " at " + std::to_string(size));
      test::expect_ranks_succeed("DataParallelRank.Worker", size,
                                 {{"GODWIT_TEST_DIR", root_.string()}, {"GODWIT_TEST_CASE", name}});
      dist::Group alone;
      expect_close(io::load_tensors(root_ / "got.safetensors"),
                   first_step(recipe("x", options_of_case(name)), alone),
                   /*limit=*/1e-6);  // the order of fp32 sums over the batch
    }
  }
}

// Two ranks add what two micro-batches of the same sequences add: not a bit differs.
TEST_F(DataParallel, TwoRanksAreTwoMicroBatches) {
  test::expect_ranks_succeed("DataParallelRank.Worker", 2,
                             {{"GODWIT_TEST_DIR", root_.string()}, {"GODWIT_TEST_CASE", "plain"}});
  std::vector<std::string> options = options_of_case("plain");
  options.push_back("train.micro_batch_tokens=128");
  dist::Group alone;
  at::set_num_threads(1);
  const io::NamedTensors got = io::load_tensors(root_ / "got.safetensors"),
                         want = first_step(recipe("x", options), alone);
  ASSERT_EQ(got.size(), want.size());
  const std::map<std::string, at::Tensor> by_name(got.begin(), got.end());
  for (const auto& [name, expected] : want) {
    if (name == "loss") continue;  // summed in another order, in fp64
    EXPECT_TRUE(test::bit_equal(by_name.at(name), expected)) << name;
  }
}

TEST_F(DataParallel, AFaultOfOneRankIsAFaultOfAll) {
  test::expect_ranks_succeed("DataParallelRank.Worker", 2,
                             {{"GODWIT_TEST_DIR", root_.string()}, {"GODWIT_TEST_CASE", "fault"}});
}

// bf16 weights: the gradients of several micro-batches are added in fp32. Added in bf16 each sum would be a
// bf16 number, and one of many micro-batches would lose what is 256 times smaller than it.
TEST_F(DataParallel, Bf16MicroBatchesAreSummedInFp32) {
  dist::Group alone;
  const auto whole = first_step(recipe("x", {"train.dtype=bf16"}), alone);
  const auto pieces = first_step(
      recipe("x", {"train.dtype=bf16", "train.micro_batch_tokens=32", "stage.1.context=32"}), alone);
  const std::map<std::string, at::Tensor> by_name(pieces.begin(), pieces.end());
  int compared = 0, finer = 0;
  for (const auto& [name, expected] : whole) {
    if (!name.starts_with("gradient of ") || expected.scalar_type() != at::kBFloat16) continue;
    const at::Tensor& sum = by_name.at(name);
    EXPECT_EQ(sum.scalar_type(), at::kFloat) << name;
    EXPECT_LT(relative(sum, expected), 0.1) << name;  // bf16 activations
    finer += !at::equal(sum.to(at::kBFloat16).to(at::kFloat), sum);
    ++compared;
  }
  EXPECT_GT(compared, 20);
  EXPECT_GT(finer, compared * 3 / 4);
}

}  // namespace
}  // namespace godwit
