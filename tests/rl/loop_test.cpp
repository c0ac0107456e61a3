#include "godwit/rl/loop.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <csignal>
#include <fstream>
#include <nlohmann/json.hpp>

#include "godwit/base/file.h"
#include "godwit/io/checkpoint_tensor.h"
#include "godwit/model/checkpoint.h"
#include "godwit/train/checkpoint.h"
#include "tests/rl/tiny_policy.h"
#include "tests/support/compare.h"
#include "tests/support/files.h"

namespace godwit::rl {
namespace {

using nlohmann::json;

// "interrupting": chatter, and at the given turn of the process somebody presses Ctrl-C.
class Interrupting final : public Environment {
 public:
  static inline int64_t turns_until = 0;  // 0: nobody does

  explicit Interrupting(const json& options) : inner_(make_environment("chatter", options)) {}
  Task reset(uint64_t seed) override { return inner_->reset(seed); }
  StepResult step(const ChatMessage& turn) override {
    if (turns_until > 0 && --turns_until == 0) std::raise(SIGINT);
    return inner_->step(turn);
  }
  std::string save() const override { return inner_->save(); }
  void load(std::string_view saved) override { inner_->load(saved); }
  uint64_t state_hash() const override { return inner_->state_hash(); }

 private:
  std::unique_ptr<Environment> inner_;
};

class RlRun : public ::testing::Test {
 protected:
  void SetUp() override {
    at::set_num_threads(2);
    test::register_chatter();
    LoadedModel model = test::tiny_policy(3);
    std::filesystem::create_directories(dir_ / "init");
    save_weights(model.config, model.weights, dir_ / "init");
    model.tokenizer.save(dir_ / "init");
  }

  RlRecipe recipe(const std::string& out, const std::vector<std::string>& more = {}) {
    const std::string toml = R"(
steps = 4
seed = 1
[[environment]]
name = "chatter"
options = {turns = 2, letters = 1}
[rollout]
groups = 4
samples = 4
turn_tokens = 24
context = 256
[optimizer]
muon_lr = 1e-3
adamw_lr = 1e-2
[eval]
tasks = 16
[train]
tensorboard = false
)";
    std::vector<std::string> set = {"out=" + (dir_ / out).string(), "init=" + (dir_ / "init").string()};
    set.insert(set.end(), more.begin(), more.end());
    return parse_rl_recipe(toml, "test.toml", set);
  }

  // Without what a clock says.
  std::vector<json> rows(const std::string& out) {
    std::ifstream file(dir_ / out / "metrics.jsonl");
    std::vector<json> all;
    for (std::string line; std::getline(file, line);) {
      all.push_back(json::parse(line));
      all.back().erase("rollout_s");
      all.back().erase("train_s");
    }
    return all;
  }

  testing::ScratchDir dir_;
};

TEST_F(RlRun, LearnsWhatIsRewarded) {
  const RlSummary s =
      run_rl(recipe("a", {"steps=12", "rollout.groups=6", "rollout.samples=8",
                          "environment.0.options.turns=1", "optimizer.adamw_lr=2e-2", "eval.tasks=64"}),
             {});
  EXPECT_TRUE(s.finished);
  EXPECT_EQ(s.steps, 12);
  EXPECT_EQ(s.max_dlogp, 0);  // asserted in every step
  EXPECT_EQ(s.before.episodes, 64);
  // The reward is easy to come by: more of four letters. Intervals at 95 % of the two arms must not touch.
  EXPECT_GT(share_interval(s.after.solved, 64).low, share_interval(s.before.solved, 64).high)
      << s.before.success << " -> " << s.after.success;
  const auto all = rows("a");
  ASSERT_EQ(all.size(), 12u);
  for (const char* key :
       {"step", "reward", "success", "recovery", "calls", "tokens", "staleness", "max_dlogp", "entropy",
        "masked_share", "kl", "effective_share", "skipped_groups"}) {
    EXPECT_TRUE(all.back().contains(key)) << key;
  }
  EXPECT_TRUE(all.back().contains("eval_success"));
  const json kept = json::parse(read_file(dir_ / "a/trajectories/step-12.json"));
  EXPECT_EQ(kept.size(), 8u);
  EXPECT_NE(kept[0]["turns"][0]["before"].get<std::string>().find("Tell me about"), std::string::npos);
  EXPECT_EQ(load_model((dir_ / "a/model").string(), at::kCPU).config.hidden, 32);
}

// Partial rollouts, so that suspended episodes and their environments go through the checkpoint.
TEST_F(RlRun, ResumesBitForBit) {
  const std::vector<std::string> partial = {"rollout.finish_share=0.4", "rollout.groups=5",
                                            "checkpoint.every=2"};
  auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), partial.begin(), partial.end());
    return more;
  };
  run_rl(recipe("whole", partial), {});
  run_rl(recipe("parts", with({"train.time_limit_s=1e-9"})), {});
  EXPECT_EQ(rows("parts").size(), 1u);
  testing::expect_error([&] { run_rl(recipe("parts", partial), {}); }, {"holds a run already"});
  testing::expect_error([&] { run_rl(recipe("parts", with({"objective.tau=0.5"})), {.resume = true}); },
                        {"objective.tau", "cannot change"});
  run_rl(recipe("parts", with({"train.time_limit_s=1e-9"})), {.resume = true});
  EXPECT_EQ(rows("parts").size(), 2u);
  const RlSummary s = run_rl(recipe("parts", partial), {.resume = true});
  EXPECT_TRUE(s.finished);
  const auto a = rows("whole"), b = rows("parts");
  ASSERT_EQ(a.size(), b.size());
  int64_t suspended = 0;
  double moved = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].dump(), b[i].dump());
    moved += a[i].at("grad_norm").get<double>();
    suspended += a[i].at("suspended").get<int64_t>();
  }
  EXPECT_GT(suspended, 0);
  EXPECT_GT(moved, 0);
  const auto x = io::load_tensors(dir_ / "whole/model/model.safetensors");
  const auto y = io::load_tensors(dir_ / "parts/model/model.safetensors");
  ASSERT_EQ(x.size(), y.size());
  for (size_t i = 0; i < x.size(); ++i) EXPECT_TRUE(test::bit_equal(x[i].second, y[i].second)) << x[i].first;
}

// Stopped in the middle of phases: the states of the episodes under way go through the checkpoint.
TEST_F(RlRun, StoppedWithinAPhaseItGoesOnAtTheSameToken) {
  register_environment("interrupting", [](const json& o) { return std::make_unique<Interrupting>(o); });
  const std::vector<std::string> set = {"environment.0.name=interrupting", "environment.0.options.turns=3",
                                        "rollout.turn_tokens=40", "rollout.concurrent=6", "eval.tasks=0"};
  Interrupting::turns_until = 0;
  run_rl(recipe("whole", set), {});
  int64_t stops = 0, states = 0;
  for (; stops < 50; ++stops) {
    Interrupting::turns_until = 5 + 3 * stops;
    const RlSummary s = run_rl(recipe("parts", set), {.resume = stops > 0});
    if (s.finished) break;
    const auto saved = load_newest_checkpoint(dir_ / "parts/checkpoints");
    ASSERT_TRUE(saved.has_value());
    for (const auto& [name, tensor] : saved->tensors) states += name.starts_with("suspended.");
  }
  EXPECT_GT(stops, 3);
  EXPECT_GT(states, 0);
  const auto a = rows("whole"), b = rows("parts");
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_EQ(a[i].dump(), b[i].dump());
  const auto x = io::load_tensors(dir_ / "whole/model/model.safetensors");
  const auto y = io::load_tensors(dir_ / "parts/model/model.safetensors");
  for (size_t i = 0; i < x.size(); ++i) EXPECT_TRUE(test::bit_equal(x[i].second, y[i].second)) << x[i].first;
}

// Partial rollouts on kept states: what trains is what was drawn, resume is bit for bit, and every token is
// compared in the phase that drew it.
TEST_F(RlRun, KeepsStatesThroughItsCheckpoints) {
  const std::vector<std::string> set = {"rollout.finish_share=0.4", "rollout.groups=5",
                                        "rollout.keep_states=true", "checkpoint.every=1"};
  auto with_limit = set;
  with_limit.emplace_back("train.time_limit_s=1e-9");
  const RlSummary whole = run_rl(recipe("whole", set), {});
  EXPECT_EQ(whole.max_dlogp, 0);
  for (int i = 0; i < 3; ++i) run_rl(recipe("parts", with_limit), {.resume = i > 0});
  run_rl(recipe("parts", set), {.resume = true});
  const auto a = rows("whole"), b = rows("parts");
  ASSERT_EQ(a.size(), b.size());
  double staleness = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].dump(), b[i].dump());
    EXPECT_EQ(a[i].at("max_dlogp"), 0);
    EXPECT_GT(a[i].at("compared_tokens"), 0);
    staleness += a[i].at("staleness").get<double>();
  }
  EXPECT_GT(staleness, 0);
}

// Two environments, a teacher for one of them: the student comes nearer to it where the teacher speaks.
TEST_F(RlRun, LearnsFromATeacher) {
  LoadedModel teacher = test::tiny_policy(3, /*ending=*/14);
  std::filesystem::create_directories(dir_ / "teacher");
  save_weights(teacher.config, teacher.weights, dir_ / "teacher");
  teacher.tokenizer.save(dir_ / "teacher");
  RlRecipe r =
      recipe("a", {"steps=10", "reward.success=0", "eval.tasks=0", "optimizer.muon_lr=1e-4",
                   "optimizer.adamw_lr=1e-2", "environment.0.teacher=" + (dir_ / "teacher").string()});
  r.rollout.environments.push_back({.name = "calculator", .options = "{}", .weight = 0.3, .teacher = ""});
  r.rollout.context = 768;
  run_rl(r, {});
  const auto all = rows("a");
  ASSERT_EQ(all.size(), 10u);
  const auto mean = [&](size_t from, size_t to) {
    double sum = 0;
    for (size_t i = from; i < to; ++i) sum += all[i].at("teacher_kl").get<double>();
    return sum / static_cast<double>(to - from);
  };
  EXPECT_GT(mean(0, 3), 0.1);
  EXPECT_LT(mean(7, 10), 0.7 * mean(0, 3));
}

// Episodes that never come to their end have equal rewards: nothing is learned, and the run says why.
TEST_F(RlRun, SaysThatEpisodesAreCutOff) {
  ::testing::internal::CaptureStderr();
  run_rl(recipe("cut", {"steps=1", "rollout.turn_tokens=1", "eval.tasks=4"}), {});
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("cut off: rollout.turn_tokens"), std::string::npos) << said;
}

TEST_F(RlRun, BadRecipesNameTheKey) {
  testing::expect_error([&] { recipe("a", {"objective.kind=ppo"}); }, {"objective.kind", "clip_band"});
  testing::expect_error([&] { recipe("a", {"reward.budget_end=3"}); }, {"budget_end"});
  testing::expect_error([&] { recipe("a", {"reward.success=inf"}); }, {"reward.success", "got inf"});
  testing::expect_error([&] { recipe("a", {"optimizer.qk_clip=100"}); }, {"qk_clip"});
  testing::expect_error([&] { run_rl(recipe("a", {"environment.0.name=chess"}), {}); }, {"chess"});
  const RlRecipe r = recipe("a", {"objective.kind=dapo", "objective.tau=0.25"});
  EXPECT_EQ(r.objective.clip_high, 0.28);
  EXPECT_EQ(r.objective.tau, 0.25);
  RlRecipe again = parse_rl_recipe(to_toml(r), "again.toml");
  EXPECT_EQ(again, r);
}

TEST_F(RlRun, DocumentationNamesEveryKey) {
  const std::string text = read_file(std::string(GODWIT_SOURCE_DIR) + "/docs/rl.md");
  RlRecipe r = recipe("a");
  for (const std::string& key : list_fields([&](Fields& f) { visit(f, r); })) {
    if (key.starts_with("optimizer.") || key.starts_with("schedule.")) continue;  // docs/training.md
    EXPECT_NE(text.find("`" + key + "`"), std::string::npos) << key;
  }
}

TEST(ShareInterval, Wilson) {
  // 8 of 10, as in Wilson 1927's formula computed by hand: (0.8 + 0.19208 -/+ 1.95996 sqrt(0.016 + 0.0096))
  // / 1.38415.
  const Interval i = share_interval(8, 10);
  EXPECT_NEAR(i.low, 0.4902, 2e-4);
  EXPECT_NEAR(i.high, 0.9433, 2e-4);
  EXPECT_EQ(share_interval(0, 0).high, 1);
}

}  // namespace
}  // namespace godwit::rl
