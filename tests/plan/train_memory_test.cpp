// The forecast against what a forward and backward really hold, counted by LibTorch's allocator hooks.
#include "godwit/plan/train_memory.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "godwit/model/forward.h"
#include "godwit/model/vision.h"
#include "godwit/ops/ops.h"
#include "tests/support/meter.h"

namespace godwit {
namespace {

// `nano` with fewer and smaller experts, so that a test takes a second; every kind of layer is there.
ModelConfig small() {
  nlohmann::json json = preset_json("nano");
  json["text_config"]["vocab_size"] = 1024;
  json["text_config"]["num_experts"] = 64;
  json["text_config"]["num_experts_per_token"] = 4;
  return parse_model_config(json, "small nano");
}

TrainShape shape_of(int64_t context, int64_t tokens, bool recompute) {
  TrainShape shape;
  shape.context = context;
  shape.micro_tokens = tokens;
  shape.recompute = recompute;
  return shape;
}

// Peak of activations, gradients and workspace of one micro-batch.
double measure(const ModelConfig& config, const TrainShape& shape) {
  ModelWeights weights = init_weights(config, 1, at::kCPU, at::kFloat);
  set_requires_grad(config, weights, true);
  PackedBatch batch{.ids = at::randint(config.vocab_size, {shape.micro_tokens}, at::kLong),
                    .cu_seqlens = make_cu_seqlens(std::vector<int64_t>(
                        static_cast<size_t>(shape.micro_tokens / shape.context), shape.context))};
  const at::Tensor weight = at::full({shape.micro_tokens}, 1.0 / static_cast<double>(shape.micro_tokens));
  ForwardOptions options;
  options.recompute = shape.recompute;
  const auto meter = std::make_shared<test::Meter>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
  const at::Tensor hidden = forward_hidden(config, weights, batch, nullptr, options);
  std::get<0>(ops::linear_cross_entropy(hidden, head_weight(config, weights), batch.ids, weight)).backward();
  return static_cast<double>(meter->peak);
}

class Forecast : public ::testing::TestWithParam<std::tuple<int64_t, int64_t, bool>> {};

TEST_P(Forecast, IsWithinFivePercentOfWhatAStepHolds) {
  const auto [context, tokens, recompute] = GetParam();
  const ModelConfig config = small();
  const TrainShape shape = shape_of(context, tokens, recompute);
  const TrainMemory forecast = forecast_training(config, shape);
  const double expected = forecast.gradients + forecast.activations + forecast.workspace;
  const double measured = measure(config, shape);
  EXPECT_NEAR(expected / measured, 1.0, 0.05)
      << "forecast " << describe(forecast) << ", measured " << measured / (1 << 20) << " MiB";
}

INSTANTIATE_TEST_SUITE_P(Shapes, Forecast,
                         ::testing::Values(std::tuple{256, 2048, false}, std::tuple{2048, 2048, false},
                                           std::tuple{257, 257 * 8, false}, std::tuple{1024, 4096, true}));

// Pictures of three sizes among the text: the tower's activations are kept through all of it.
TEST(TrainMemory, PicturesCount) {
  ModelConfig config = small();
  config.media_id = 1023;
  config.vision = VisionConfig{.pos_emb_height = 8,
                               .pos_emb_width = 8,
                               .layers = 3,
                               .hidden = 96,
                               .intermediate = 256,
                               .heads = 4,
                               .qkv_hidden = 128};
  TrainShape shape = shape_of(256, 1024, false);
  VisionInput pictures;
  for (int64_t i = 0; i < 24; ++i)
    pictures.grids.push_back({.frames = 1 + i % 3, .rows = 8, .columns = 4 + 4 * (i % 3)});
  for (const VisionGrid& grid : pictures.grids) {
    shape.patches += grid.patches();
    shape.vectors += grid.in_frame() / 4;
  }
  ModelWeights weights = init_weights(config, 1, at::kCPU, at::kFloat);
  set_requires_grad(config, weights, true);
  PackedBatch batch{.ids = at::randint(config.media_id, {shape.micro_tokens}, at::kLong),
                    .cu_seqlens = make_cu_seqlens({256, 256, 256, 256})};
  batch.ids.narrow(0, 100, shape.vectors).fill_(config.media_id);
  const at::Tensor targets = at::randint(config.media_id, {shape.micro_tokens}, at::kLong);
  const at::Tensor weight = at::full({shape.micro_tokens}, 1.0 / static_cast<double>(shape.micro_tokens));
  const auto meter = std::make_shared<test::Meter>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
  pictures.patches = at::randn({shape.patches, 3 * 14 * 14});
  batch.media = vision_forward(config, *weights.vision, pictures);
  const at::Tensor hidden = forward_hidden(config, weights, batch);
  std::get<0>(ops::linear_cross_entropy(hidden, head_weight(config, weights), targets, weight)).backward();
  const TrainMemory forecast = forecast_training(config, shape);
  const double expected = forecast.gradients + forecast.activations + forecast.workspace;
  EXPECT_NEAR(expected / static_cast<double>(meter->peak.load()), 1.0, 0.05)
      << "forecast " << describe(forecast) << ", measured " << static_cast<double>(meter->peak) / (1 << 20)
      << " MiB";
}

TEST(TrainMemory, FixedPartsByHand) {
  const ModelConfig config = small();
  const TrainMemory m = forecast_training(config, shape_of(128, 128, false));
  double parameters = 0, adamw = 0;
  ModelWeights weights = weight_structure(config);
  for_each_param(config, weights, [&](const ParamInfo& info, at::Tensor&) {
    double n = 1;
    for (const int64_t size : info.shape) n *= static_cast<double>(size);
    parameters += n;
    const bool muon = info.role == ParamRole::kMatrix || info.role == ParamRole::kExperts;
    if (!muon && info.role != ParamRole::kRouterBias) adamw += n;
  });
  const double biases = 7 * 64;
  EXPECT_EQ(m.weights, 4 * parameters);
  EXPECT_EQ(m.optimizer, 4 * (parameters - biases - adamw) + 8 * adamw);  // momentum; two moments
  // Seven MoE layers: a histogram of 1000 bins and four counters an expert, the scores of 128 tokens.
  EXPECT_EQ(m.balance, 7 * 64.0 * (1000 * 8 + 3 * 8 + 4 + 128 * 4));
}

TEST(TrainMemory, GrowsWithTheBatchAndShrinksWithRecomputation) {
  const ModelConfig nano = load_model_config("nano");
  double before = 0;
  for (const int64_t tokens : {256, 1024, 4096, 16384}) {
    const double now = forecast_training(nano, shape_of(256, tokens, false)).total();
    EXPECT_GT(now, before);
    const double recomputing = forecast_training(nano, shape_of(256, tokens, true)).total();
    EXPECT_LE(recomputing, now);  // one sequence: the optimiser's step is the peak of both
    if (tokens > 256) EXPECT_LT(recomputing, now);
    before = now;
  }
  TrainShape micro = shape_of(256, 1024, false);
  const double one = forecast_training(nano, micro).tensors();
  micro.accumulate = true;
  EXPECT_GT(forecast_training(nano, micro).tensors(), one);
}

TEST(TrainMemory, HalfPrecisionKeepsMasters) {
  const ModelConfig mini = load_model_config("mini");
  TrainShape shape = shape_of(2048, 2048, true);
  const TrainMemory wide = forecast_training(mini, shape);
  shape.bf16 = shape.cuda = true;
  shape.fused = fused_ops(true);
  const TrainMemory half = forecast_training(mini, shape);
  EXPECT_NEAR(half.weights / wide.weights, 0.5, 0.01);
  EXPECT_NEAR(half.optimizer / wide.optimizer, 2.0, 0.05);
  EXPECT_EQ(half.process, 0);
}

// On a GPU what is composed of LibTorch's operations keeps more than a kernel does.
TEST(TrainMemory, EveryKernelOnAGpuSavesMemory) {
  const ModelConfig mini = load_model_config("mini");
  TrainShape shape = shape_of(2048, 8192, false);
  shape.bf16 = shape.cuda = true;
  shape.fused = {.mix = false, .glu = false, .experts = false, .router = false, .histogram = false};
  double before = forecast_training(mini, shape).activations;
  for (bool FusedOps::*op : {&FusedOps::mix, &FusedOps::glu, &FusedOps::experts, &FusedOps::router}) {
    shape.fused.*op = true;
    const double now = forecast_training(mini, shape).activations;
    EXPECT_LT(now, before);
    before = now;
  }
}

}  // namespace
}  // namespace godwit
