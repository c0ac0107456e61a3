#include "godwit/plan/cluster.h"

#include <gtest/gtest.h>

#include "godwit/base/check.h"
#include "godwit/plan/activations.h"

namespace godwit {
namespace {

ClusterOptions options(int64_t gpus) {
  ClusterOptions o;
  o.gpus = gpus;
  return o;
}

std::string refusal(const ModelConfig& config, const ClusterOptions& o) {
  try {
    plan_cluster(config, o);
  } catch (const Error& e) {
    return e.what();
  }
  return "it fits";
}

TEST(Cluster, MemoryFallsWithMoreGpus) {
  const ModelConfig k3 = load_model_config("kimi-k3");
  double before = 1e300;
  for (const int64_t gpus : {512, 1024, 2048, 4096}) {
    const ClusterPlan plan = plan_cluster(k3, options(gpus));
    EXPECT_EQ(plan.layout.gpus(), gpus);
    EXPECT_LT(plan.memory.total(), before) << gpus;
    EXPECT_LE(plan.memory.total(), Gpu{}.memory_bytes) << gpus;
    before = plan.memory.total();
  }
}

// One GPU, by hand: nothing is split, nothing is sent.
TEST(Cluster, OneGpuHoldsEverything) {
  const ModelConfig nano = load_model_config("nano");
  ClusterOptions o = options(1);
  o.context = 2048;
  const ClusterPlan plan = plan_cluster(nano, o);
  double fp32_values = 0;  // convolutions, decay, output norms, router biases of the layers
  const double inner = 2 * 128;
  fp32_values += 6 * (3 * inner * 4 + 2 + inner + 128);  // 6 KDA layers
  fp32_values += 7 * 896;                                // 7 MoE layers
  const double all = 46038720 - 6 * 126;  // as stored, less the zeros behind the two A_log of each KDA layer
  EXPECT_DOUBLE_EQ(plan.memory.weights, (all - fp32_values) * 2 + fp32_values * 4);
  EXPECT_DOUBLE_EQ(plan.memory.gradients, plan.memory.weights);
  for (const double bytes : plan.sent_bytes) EXPECT_EQ(bytes, 0);
  EXPECT_EQ(plan.batch_tokens, 2048);
  EXPECT_EQ(plan.bubble, 0);
}

// Every kind of traffic of a small layout, by hand.
TEST(Cluster, TrafficByHand) {
  ModelConfig nano = load_model_config("nano");
  ClusterOptions o = options(4);
  o.tp = 2, o.dp = 2, o.ep = 4, o.pp = 1, o.cp = 1;
  o.context = 1024;
  o.batch_tokens = 4096;  // two micro-batches a data rank
  const ClusterPlan plan = plan_cluster(nano, o);
  EXPECT_EQ(plan.micro_batches, 2);
  // Forward, its repetition and backward; two sub-layers with an all-gather and a reduce-scatter of bf16
  // rows.
  EXPECT_DOUBLE_EQ(plan.sent_bytes[0], 2 * 8 * 3 * 4 * 0.5 * 1024 * 256 * 2);
  // 7 MoE layers; half a sequence a GPU; 16 rows of the latent 64 there and back; three of four go elsewhere.
  EXPECT_DOUBLE_EQ(plan.sent_bytes[1], 2 * 7 * 3 * 2 * 0.75 * 512 * 16 * 64 * 2);
  EXPECT_EQ(plan.sent_bytes[2], 0);
  EXPECT_EQ(plan.sent_bytes[3], 0);
  EXPECT_GT(plan.sent_bytes[4], 0);
  // All inside one host of eight.
  EXPECT_DOUBLE_EQ(plan.sent_seconds[1], plan.sent_bytes[1] / 350e9);
  // Over hosts of two, two thirds of the expert rows that leave a GPU leave the host.
  o.gpu.per_host = 2;
  EXPECT_NEAR(plan_cluster(nano, o).sent_seconds[1],
              plan.sent_bytes[1] / 3 / 350e9 + plan.sent_bytes[1] * 2 / 3 / 50e9, 1e-12);
}

TEST(Cluster, StatesPassAlongTheContext) {
  ClusterOptions o = options(4);
  o.cp = 4, o.tp = o.pp = o.ep = o.dp = 1;
  o.context = 8192;
  o.recompute = false;
  const ClusterPlan plan = plan_cluster(load_model_config("nano"), o);
  const double kda =
      6 * 2.0 * 3 * (2 * 128 * 256 * 4);  // transition and state in fp32 to three others, twice
  const double mla = 2 * 3.0 * 3 * (2048 * (64 + 16) * 2);  // latent rows twice, their gradients once
  EXPECT_DOUBLE_EQ(plan.sent_bytes[2], kda + mla);
}

TEST(Cluster, TimeIsFlopsOverPeakTimesMfu) {
  ClusterOptions o = options(1024);
  o.tokens = 1'000'000'000'000;
  o.mfu = 0.25;
  o.price = 2;
  const ClusterPlan plan = plan_cluster(load_model_config("kimi-k3"), o);
  if (!plan.communication_bound) {
    EXPECT_NEAR(plan.step_time_s, plan.step_flops / (1024 * 989e12 * 0.25), 1e-9);
  }
  EXPECT_GE(plan.step_time_s, plan.communication_s());
  EXPECT_EQ(plan.steps, (o.tokens + plan.batch_tokens - 1) / plan.batch_tokens);
  EXPECT_NEAR(plan.gpu_hours, plan.seconds / 3600 * 1024, 1e-3);
  EXPECT_NEAR(plan.cost, plan.gpu_hours * 2, 1e-3);
}

TEST(Cluster, MorePipelineStagesMeanBubbles) {
  ClusterOptions o = options(8);
  o.pp = 4;
  const ClusterPlan plan = plan_cluster(load_model_config("nano"), o);
  EXPECT_DOUBLE_EQ(plan.bubble, 3.0 / (16 + 3));  // 4 PP micro-batches
}

TEST(Cluster, RefusesWhatDoesNotFitAndNamesTheNearest) {
  const ModelConfig k3 = load_model_config("kimi-k3");
  const std::string small = refusal(k3, options(8));
  EXPECT_NE(small.find("does not fit"), std::string::npos) << small;
  EXPECT_NE(small.find("the nearest that does: "), std::string::npos) << small;

  ClusterOptions o = options(1024);
  o.tp = o.pp = o.ep = 1;
  const std::string asked = refusal(k3, o);
  EXPECT_NE(asked.find("TP 1, PP 1"), std::string::npos) << asked;
  EXPECT_NE(asked.find("1024 GPUs with"), std::string::npos) << asked;

  // What it names fits.
  const size_t at = small.find("does: ");
  EXPECT_NO_THROW(plan_cluster(k3, options(std::stoll(small.substr(at + 6)))));
}

TEST(Cluster, ImpossibleLayoutsSayWhy) {
  const ModelConfig k3 = load_model_config("kimi-k3");
  ClusterOptions o = options(1024);
  o.tp = 5;
  EXPECT_NE(refusal(k3, o).find("impossible layout"), std::string::npos) << refusal(k3, o);
  o = options(1024);
  o.ep = 5;
  EXPECT_NE(refusal(k3, o).find("EP 5 does not divide the 896 experts"), std::string::npos) << refusal(k3, o);
  o = options(1024);
  o.pp = 128;
  EXPECT_NE(refusal(k3, o).find("PP 128 is more than the 93 layers"), std::string::npos) << refusal(k3, o);
}

TEST(Activations, AKdaAndAnMlaLayerByHand) {
  const ModelConfig nano = load_model_config("nano");
  // 10 tensors of 256, 128 between the decay projections, 2 beta logits; in fp32 256 values and a state of
  // 256 x 128 every 128 tokens.
  EXPECT_EQ(kept_by_token_mixer(nano, 0).model, 10 * 256 + 128 + 2);
  EXPECT_EQ(kept_by_token_mixer(nano, 0).fp32, 256 + 256);
  // q 128 twice; latent 64 three times and 16; queries and keys of 2 x 64; values, two outputs, gate and
  // gated.
  EXPECT_EQ(kept_by_token_mixer(nano, 3).model, 256 + 208 + 2 * 128 + 5 * 128);
  EXPECT_EQ(kept_by_channel_mixer(nano, 0).model, 3 * 512);
  EXPECT_EQ(kept_by_channel_mixer(nano, 1).model, 3 * 64 + 3 * 64);
  EXPECT_EQ(kept_by_channel_mixer(nano, 1).fp32, 896 + 32);
}

}  // namespace
}  // namespace godwit
