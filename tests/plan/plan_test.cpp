#include "godwit/plan/plan.h"

#include <gtest/gtest.h>

namespace godwit {
namespace {

TEST(Plan, KimiK3CountsAreTheReleasedOnes) {
  const Plan plan = make_plan(load_model_config("kimi-k3"), 1048576);
  EXPECT_EQ(plan.parameters.total, 2779931837184);
  EXPECT_EQ(plan.parameters.vision, 401214464);
  EXPECT_NEAR(plan.parameters.active / 1e9, 104.19, 0.005);
  EXPECT_NEAR(plan.parameters.active_without_head / 1e9, 103.02, 0.005);
  EXPECT_EQ(plan.checkpoint_bytes, 1560860324864);  // total_size of the released index
  EXPECT_EQ(plan.state.mla_bf16_per_token, 27648);
  EXPECT_EQ(plan.state.kda_fp32, 414ll * 1024 * 1024);
  EXPECT_EQ(plan.parameters.by_module.at("routed_experts"), 2722740830208);
}

// 16 experts of 3 x 3072 x 3584 values in 92 layers; two values a byte and a scale byte for 32.
constexpr double kK3ExpertBytes = 16.0 * 92 * 3 * 3072 * 3584 * (0.5 + 1.0 / 32);

TEST(Plan, KimiK3CheckpointByDtype) {
  const Plan plan = make_plan(load_model_config("kimi-k3"), 8192);
  EXPECT_EQ(plan.checkpoint_bytes_by_dtype.at("mxfp4"), 2722740830208 / 2 + 2722740830208 / 32);
  EXPECT_NEAR(plan.checkpoint_bytes_by_dtype.at("bf16") / 2e9, 57.18, 0.005);
  EXPECT_NEAR(plan.checkpoint_bytes_by_dtype.at("f32") / 4e6, 11.1, 0.05);
}

TEST(Plan, KimiK3BytesOfADecodedToken) {
  const ModelConfig k3 = load_model_config("kimi-k3");
  const Plan one = make_plan(k3, 1048576);
  EXPECT_NEAR(one.decode_bytes.routed_experts, kK3ExpertBytes, 1e6);  // 25.8 GB
  EXPECT_EQ(one.decode_bytes.kda_state, 2 * 414.0 * 1024 * 1024);
  EXPECT_EQ(one.decode_bytes.mla_cache, 27648.0 * 1048577);
  EXPECT_EQ(one.state.at(1048576), 414ll * 1024 * 1024 + 69 * 3 * 12288 * 3 * 2 + 27648ll * 1048576);
  // Half of the active weights are read in bf16: 104.19 B less the experts' 48.6 B, two bytes each.
  EXPECT_NEAR(one.decode_bytes.other_weights / 2e9, 104.19 - 48.62, 0.02);
  // A batch shares the weights: 64 tokens touch 1 - (1 - 1/56)^64 = 68.4 % of the experts.
  const Plan many = make_plan(k3, 1024, 64);
  EXPECT_NEAR(many.decode_bytes.other_weights * 64, one.decode_bytes.other_weights, 1);
  EXPECT_NEAR(many.decode_bytes.routed_experts * 64, kK3ExpertBytes * 56 * 0.68437,
              kK3ExpertBytes * 56 * 1e-4);
}

// Operations a token: two a weight that is multiplied, and attention's own.
TEST(Plan, KimiK3Flops) {
  const ModelConfig k3 = load_model_config("kimi-k3");
  const Plan plan = make_plan(k3, 1048576);
  const double matrices = 2 * 104.18e9;  // the 104.19 B less norms, queries, decay
  const double kda = 69.0 * 96 * 114688, step = 69.0 * 96 * 7 * 128 * 128;
  const double prefill = 24.0 * 96 * 2 * (192 + 128) * 524288, decode = 24.0 * 96 * 2 * (576 + 512) * 1048576;
  EXPECT_NEAR(plan.flops.prefill, matrices + kda + prefill, 0.02e9 * 2);
  EXPECT_NEAR(plan.flops.decode, matrices + step + decode, 0.02e9 * 2);
  EXPECT_DOUBLE_EQ(plan.flops.train, 3 * plan.flops.prefill);
  // Growth with the context is MLA's alone.
  EXPECT_NEAR(make_plan(k3, 2097152).flops.decode - plan.flops.decode, decode, 1);
}

TEST(Plan, ModulesAddUp) {
  for (const std::string& name : preset_names()) {
    const Plan plan = make_plan(load_model_config(name), 8192);
    int64_t sum = 0, active = 0, bytes = 0;
    for (const auto& [module, count] : plan.parameters.by_module) sum += count;
    for (const auto& [module, count] : plan.parameters.active_by_module) active += count;
    for (const auto& [dtype, n] : plan.checkpoint_bytes_by_dtype) bytes += n;
    EXPECT_EQ(sum, plan.parameters.total) << name;
    EXPECT_EQ(active, plan.parameters.active) << name;
    EXPECT_EQ(bytes, plan.checkpoint_bytes) << name;
    EXPECT_GT(plan.flops.decode, 0) << name;
  }
}

TEST(Plan, KimiLinearIsThe48BModel) {
  const Plan plan = make_plan(load_model_config("kimi-linear-48b"), 8192);
  EXPECT_NEAR(plan.parameters.total / 1e9, 49.1, 0.3);
  EXPECT_NEAR(plan.parameters.active / 1e9, 3.1, 0.3);
}

}  // namespace
}  // namespace godwit
