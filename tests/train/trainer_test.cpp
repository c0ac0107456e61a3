// Whole runs on a tiny model: learning, resuming bit for bit, gates, faults.
#include "godwit/train/trainer.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "godwit/base/check.h"
#include "godwit/io/checkpoint_tensor.h"
#include "tests/support/compare.h"
#include "tests/train/tiny_run.h"

namespace godwit {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using Trainer = test::TinyRun;

TEST_F(Trainer, LearnsThroughTwoStagesAndLeavesARunDirectory) {
  const RunSummary s = run_training(recipe("run"), {});
  EXPECT_TRUE(s.finished);
  EXPECT_EQ(s.steps, 18);
  EXPECT_EQ(s.tokens, 18 * 256);
  EXPECT_LT(s.after.nats_per_token, s.before.nats_per_token - 1.0);
  EXPECT_GT(s.after.bits_per_byte, 0);
  const auto rows = metrics("run");
  ASSERT_EQ(rows.size(), 18u);
  for (size_t i = 0; i < rows.size(); ++i) EXPECT_EQ(rows[i]["step"], i + 1);
  EXPECT_EQ(rows[0]["stage"], "short");
  EXPECT_EQ(rows[17]["context"], 64);
  EXPECT_EQ(rows[0]["max_vio"].size(), 2u);  // the first layer is dense
  EXPECT_TRUE(fs::exists(root_ / "run" / "model" / "config.json"));
  EXPECT_TRUE(fs::exists(root_ / "run" / "checkpoints" / "step-18" / "state.safetensors"));
  // The written recipe is the resolved one: it loads to an equal recipe.
  EXPECT_EQ(load_recipe((root_ / "run" / "recipe.toml").string()), recipe("run"));
}

TEST_F(Trainer, ResumesWithMovedDataButNotWithOtherData) {
  run_training(recipe("moved", {"train.time_limit_s=1e-9"}), {});
  fs::copy(root_ / "data", root_ / "elsewhere", fs::copy_options::recursive);
  const std::string path = "data.0.path=" + (root_ / "elsewhere").string();
  EXPECT_TRUE(run_training(recipe("moved", {path, "train.time_limit_s=1e-9"}), {.resume = true}).steps < 18);
  fs::remove_all(root_ / "elsewhere");
  test::pack_tiny_data(root_ / "other", 39);
  fs::rename(root_ / "other" / "data", root_ / "elsewhere");
  EXPECT_THAT([&] { run_training(recipe("moved", {path}), {.resume = true}); },
              ThrowsMessage<Error>(AllOf(HasSubstr("elsewhere"), HasSubstr("does not hold the data"))));
  EXPECT_TRUE(run_training(recipe("moved"), {.resume = true}).finished);
}

TEST_F(Trainer, ResumesBitForBit) {
  run_training(recipe("whole"), {});
  // Stopped by its time limit after the first step, then resumed.
  const RunSummary first = run_training(recipe("parts", {"train.time_limit_s=1e-9"}), {});
  EXPECT_FALSE(first.finished);
  EXPECT_LT(first.steps, 18);
  const RunSummary rest = run_training(recipe("parts"), {.resume = true});
  EXPECT_TRUE(rest.finished);
  const auto a = model("whole"), b = model("parts");
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].first, b[i].first);
    EXPECT_TRUE(test::bit_equal(b[i].second, a[i].second)) << a[i].first;
  }
  const auto rows = metrics("parts"), expected = metrics("whole");
  ASSERT_EQ(rows.size(), expected.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i]["step"], expected[i]["step"]);
    EXPECT_EQ(rows[i]["loss"], expected[i]["loss"]) << i;
    EXPECT_EQ(rows[i]["max_vio"], expected[i]["max_vio"]) << i;
  }
}

TEST_F(Trainer, MicroBatchesAndRecomputationGiveTheSameRun) {
  run_training(recipe("whole", {"stage.0.steps=4", "stage.1.steps=2"}), {});
  run_training(recipe("parts", {"stage.0.steps=4", "stage.1.steps=2", "train.micro_batch_tokens=64",
                                "train.recompute=block"}),
               {});
  const auto a = metrics("whole"), b = metrics("parts");
  ASSERT_EQ(a.size(), b.size());
  // The gradients' sums run in another order; Newton-Schulz amplifies that, so only the losses are compared.
  for (size_t i = 0; i < a.size(); ++i)
    EXPECT_NEAR(a[i]["loss"].get<double>(), b[i]["loss"].get<double>(), 2e-3) << i;
}

TEST_F(Trainer, EveryBalanceMethodAndOptionTrains) {
  const std::vector<std::vector<std::string>> cases = {{"balance.method=sign"},
                                                       {"balance.method=aux_loss"},
                                                       {"balance.method=none"},
                                                       {"balance.entropy_regularisation=0.01"},
                                                       {"stage.1.rope_base=10000.0"},
                                                       {"stage.1.window=16"},
                                                       {"model.override.godwit.router_input=latent"},
                                                       {"model.override.godwit.mla_gate=local_global"},
                                                       {"model.override.godwit.attn_res=full"},
                                                       {"optimizer.per_head=false"},
                                                       {"optimizer.qk_clip=0.5"},
                                                       {"train.dtype=bf16"}};
  for (size_t i = 0; i < cases.size(); ++i) {
    const RunSummary s = run_training(recipe("run" + std::to_string(i), cases[i]), {});
    EXPECT_LT(s.after.nats_per_token, s.before.nats_per_token - 0.5) << cases[i][0];
  }
}

TEST_F(Trainer, GateStopsTheRunAndSaysSo) {
  const std::string message = error_of(recipe("run", {"stage.1.gate=-5.0"}));
  EXPECT_THAT(message, HasSubstr("stage long: the held-out loss at context 32"));
  EXPECT_TRUE(fs::exists(root_ / "run" / "checkpoints" / "step-18"));
}

TEST_F(Trainer, FaultsAreNamed) {
  run_training(recipe("run", {"stage.0.steps=1", "stage.1.steps=1"}), {});
  EXPECT_THAT(error_of(recipe("run")), HasSubstr("holds a run already"));
  EXPECT_THAT(error_of(recipe("run", {"stage.0.steps=1", "stage.1.steps=1", "optimizer.muon_lr=1.0"}),
                       {.resume = true}),
              HasSubstr("muon_lr"));
  EXPECT_THAT(error_of(recipe("nan", {"optimizer.adamw_lr=1e38", "optimizer.grad_clip=0.0"})),
              HasSubstr("is not finite"));
  EXPECT_THAT(error_of(recipe("absent", {"data.0.path=/no/such/data"})), HasSubstr("/no/such/data"));
}

TEST_F(Trainer, DamagedCheckpointIsPassedOverForAnOlderOne) {
  run_training(recipe("run", {"checkpoint.every=3", "checkpoint.keep=3"}), {});
  const fs::path state = root_ / "run" / "checkpoints" / "step-18" / "state.safetensors";
  std::fstream file(state, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(fs::file_size(state) / 2));
  file.put('\x5a');
  file.put('\xa5');
  file.close();
  const RunSummary s =
      run_training(recipe("run", {"checkpoint.every=3", "checkpoint.keep=3"}), {.resume = true});
  EXPECT_TRUE(s.finished);
  EXPECT_EQ(s.steps, 18);
  EXPECT_EQ(metrics("run").size(), 18u);
}

}  // namespace
}  // namespace godwit
