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

TEST(Plan, ModulesAddUp) {
  for (const std::string& name : preset_names()) {
    const Plan plan = make_plan(load_model_config(name), 8192);
    int64_t sum = 0;
    for (const auto& [module, count] : plan.parameters.by_module) sum += count;
    EXPECT_EQ(sum, plan.parameters.total) << name;
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
