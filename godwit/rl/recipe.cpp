#include "godwit/rl/recipe.h"

#include <filesystem>

#include "godwit/model/state.h"

namespace godwit::rl {
namespace {

constexpr Range kCount{1, 1e9};

void visit(Fields& f, RolloutOptions& o) {
  f.value("groups", o.groups, kCount);
  f.value("samples", o.samples, {1, 128});
  f.value("finish_share", o.finish_share, kShare);
  f.value("max_staleness", o.max_staleness, kNotNegative);
  f.value("temperature", o.temperature, kPositive);
  f.value("turn_tokens", o.turn_tokens, kCount);
  f.value("context", o.context, kCount);
  f.value("thinking", o.thinking);
  f.value("concurrent", o.concurrent, kCount);
  f.value("prefill_tokens", o.prefill_tokens, kNotNegative);
  f.value("keep_states", o.keep_states);
}

void visit(Fields& f, RewardOptions& o) {
  f.value("success", o.success, {-1e6, 1e6});
  f.value("process", o.process, kNotNegative);
  f.value("efficiency", o.efficiency, kNotNegative);
  f.value("budget_start", o.budget_start, kNotNegative);
  f.value("budget_end", o.budget_end, kNotNegative);
  f.value("budget_steps", o.budget_steps, kNotNegative);
  f.value("overlong_limit", o.overlong_limit, kNotNegative);
  f.value("overlong_buffer", o.overlong_buffer, kNotNegative);
  f.require(o.budget_end <= o.budget_start, "budget_end",
            "expected at most budget_start: the budget tightens");
}

void visit(Fields& f, AdvantageOptions& o) {
  f.choice("baseline", o.baseline, {"centred", "standardised", "leave_one_out"});
  f.choice("credit", o.credit, {"episode", "turns", "step_groups"});
  f.value("discount", o.discount, kShare);
  f.value("step_weight", o.step_weight, kNotNegative);
  f.value("skip_equal", o.skip_equal);
}

void visit(Fields& f, ObjectiveOptions& o) {
  const Objective before = o.objective;
  f.choice("kind", o.objective, {"clip_band", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "decoupled"});
  if (o.objective != before) o = default_options(o.objective);
  f.value("ratio_min", o.ratio_min, kPositive);
  f.value("ratio_max", o.ratio_max, kPositive);
  f.value("clip_low", o.clip_low, kShare);
  f.value("clip_high", o.clip_high, kNotNegative);
  f.value("tau", o.tau, kNotNegative);
  f.choice("correction", o.correction, {"none", "weight", "truncate", "mask"});
  f.value("correction_min", o.correction_min, kPositive);
  f.value("correction_max", o.correction_max, kPositive);
  f.choice("mean", o.mean, {"tokens", "group_tokens", "sequences", "constant"});
  f.value("constant_tokens", o.constant_tokens, kPositive);
  f.require(o.ratio_min <= 1 && o.ratio_max >= 1, "ratio_min", "the band ratio_min to ratio_max must hold 1");
}

void visit(Fields& f, RlEvalOptions& o) {
  f.value("every", o.every, kNotNegative);
  f.value("tasks", o.tasks, kNotNegative);
  f.value("temperature", o.temperature, kNotNegative);
}

void visit(Fields& f, RlTrainOptions& o) {
  f.value("deterministic", o.deterministic);
  f.value("max_mean_dlogp", o.max_mean_dlogp, kPositive);
  f.value("micro_batch_tokens", o.micro_batch_tokens, kNotNegative);
  f.choice("recompute", o.recompute, {"none", "block"});
  f.value("segment_tokens", o.segment_tokens, kNotNegative);
  f.value("mxfp4_experts", o.mxfp4_experts);
  f.choice("dtype", o.dtype, {"f32", "bf16"});
  f.require(o.segment_tokens % kLatentPage == 0, "segment_tokens", "expected a multiple of 64");
  f.require(o.dtype == TrainDtype::kF32 || !o.deterministic, "dtype",
            "bf16 promises no equal bits: it needs deterministic = false");
  f.value("minutes", o.minutes, kNotNegative);
  f.value("time_limit_s", o.time_limit_s, kNotNegative);
  f.value("trajectories", o.trajectories, kNotNegative);
  f.value("tensorboard", o.tensorboard);
}

RlRecipe defaults() {
  RlRecipe r;
  // Small steps: a policy is moved, not built.
  r.optimizer.muon_lr = r.optimizer.adamw_lr = 2e-4;
  r.optimizer.weight_decay = 0;
  r.optimizer.qk_clip = 0;
  r.schedule = {.warmup = 0, .min_lr_ratio = 1};
  return r;
}

RlRecipe named(RlRecipe recipe, const std::string& name) {
  if (recipe.out.empty()) recipe.out = "runs/" + std::filesystem::path(name).stem().string();
  recipe.rollout.seed = static_cast<uint64_t>(recipe.seed);
  return recipe;
}

}  // namespace

void visit(Fields& f, RlRecipe& r) {
  f.value("out", r.out);
  f.value("init", r.init);
  f.value("seed", r.seed, kNotNegative);
  f.value("steps", r.steps, {0, 1e9});
  f.require(!r.init.empty(), "init", "is missing: the model directory to start from");
  f.require(r.steps > 0, "steps", "is missing");
  f.tables("environment", r.rollout.environments, [&](Fields& g, size_t i) {
    EnvironmentChoice& c = r.rollout.environments[i];
    g.value("name", c.name);
    g.json("options", c.options);
    g.value("weight", c.weight, kPositive);
    g.value("teacher", c.teacher);
    g.require(!c.name.empty(), "name", "is missing");
  });
  f.require(!r.rollout.environments.empty(), "environment",
            "is missing: a run needs at least one [[environment]]");
  f.table("rollout", [&](Fields& g) { visit(g, r.rollout); });
  f.table("reward", [&](Fields& g) { visit(g, r.reward); });
  f.table("advantage", [&](Fields& g) { visit(g, r.advantage); });
  f.table("objective", [&](Fields& g) { visit(g, r.objective); });
  f.table("distill", [&](Fields& g) {
    g.value("weight", r.distill.weight, kNotNegative);
    g.value("limit", r.distill.limit, kPositive);
  });
  f.table("judge", [&](Fields& g) {
    g.value("command", r.judge.command);
    g.value("folder", r.judge.folder);
    g.value("weight", r.judge.weight, kNotNegative);
    g.value("longest", r.judge.longest, kNotNegative);
    g.value("answer_s", r.judge.answer_s, kPositive);
    g.value("weaker", r.judge.weaker);
  });
  f.table("optimizer", [&](Fields& g) {
    visit(g, r.optimizer);
    g.require(r.optimizer.qk_clip == 0, "qk_clip",
              "is not part of a reinforcement learning step: expected 0");
  });
  f.table("schedule", [&](Fields& g) { visit(g, r.schedule); });
  f.table("eval", [&](Fields& g) { visit(g, r.eval); });
  f.table("checkpoint", [&](Fields& g) { visit(g, r.checkpoint); });
  f.table("train", [&](Fields& g) { visit(g, r.train); });
}

RlRecipe parse_rl_recipe(std::string_view text, const std::string& name,
                         const std::vector<std::string>& overrides) {
  RlRecipe recipe = defaults();
  read_fields(text, name, overrides, [&](Fields& f) { visit(f, recipe); });
  return named(std::move(recipe), name);
}

RlRecipe load_rl_recipe(const std::string& path, const std::vector<std::string>& overrides) {
  RlRecipe recipe = defaults();
  read_fields_file(path, overrides, [&](Fields& f) { visit(f, recipe); });
  return named(std::move(recipe), path);
}

std::string to_toml(const RlRecipe& recipe) {
  RlRecipe copy = recipe;  // a visit may write
  return write_fields([&](Fields& f) { visit(f, copy); });
}

}  // namespace godwit::rl
