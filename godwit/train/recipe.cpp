#include "godwit/train/recipe.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "godwit/model/config_keys.h"

namespace godwit {
namespace {

// Bounds that keep every count of tokens far inside 64 bits.
constexpr int64_t kMostInBatch = int64_t{1} << 40, kMostSteps = 1000000000, kMostTokens = 1000000000000000000;

void visit(Fields& f, DatasetOptions& o) {
  f.value("path", o.path);
  f.value("name", o.name);
  f.value("weight", o.weight, kNotNegative);
  f.require(!o.path.empty(), "path", "is missing");
  if (o.name.empty()) o.name = std::filesystem::path(o.path).filename().string();
}

void visit(Fields& f, EvalOptions& o) {
  f.value("every", o.every, kNotNegative);
  f.value("tokens", o.tokens, kNotNegative);
  f.value("context", o.context, kNotNegative);
  f.value("data", o.data);
}

// A stage's length comes from steps or tokens, its batch from batch_tokens or sequences; the first of each is
// kept.
void visit(Fields& f, StageOptions& o, size_t index) {
  int64_t tokens = 0, sequences = 0;
  f.value("name", o.name);
  f.value("context", o.context, {1, kMostInBatch});
  f.value("batch_tokens", o.batch_tokens, {0, kMostInBatch});
  f.shorthand("sequences", sequences, {0, kMostInBatch});
  f.value("steps", o.steps, {0, kMostSteps});
  f.shorthand("tokens", tokens, {0, kMostTokens});
  f.value("mix", o.mix, kNotNegative);
  f.value("rope_base", o.rope_base, kNotNegative);
  f.value("window", o.window, kNotNegative);
  f.value("gate", o.gate, kAny);
  f.value("time_share", o.time_share, kShare);

  f.require(o.context > 0, "context", "is missing");
  f.require(o.batch_tokens == 0 || sequences == 0, "sequences", "give batch_tokens or sequences, not both");
  f.require(
      sequences <= kMostInBatch / std::max<int64_t>(1, o.context), "sequences",
      fmt::format("{} of context {} are more than {} tokens a step", sequences, o.context, kMostInBatch));
  if (sequences > 0) o.batch_tokens = sequences * o.context;
  f.require(o.batch_tokens > 0, "batch_tokens", "is missing (or give sequences)");
  f.require(o.context <= 0 || o.batch_tokens % o.context == 0, "batch_tokens",
            fmt::format("expected a multiple of context {}, got {}", o.context, o.batch_tokens));
  f.require(o.steps == 0 || tokens == 0, "tokens", "give steps or tokens, not both");
  if (tokens > 0 && o.batch_tokens > 0) o.steps = (tokens + o.batch_tokens - 1) / o.batch_tokens;
  f.require(o.steps > 0, "steps", "is missing (or give tokens)");
  f.require(!std::isnan(o.gate), "gate", "expected a number of nats, got nan");
  if (o.name.empty()) o.name = fmt::format("stage{}", index);
}

// What no single table can see.
void check_across(Fields& f, const Recipe& r) {
  f.require(r.model.name.empty() != r.init.empty(), "model",
            r.init.empty() ? "is missing: give model.name, or init to start from a model directory"
                           : "give model.name or init, not both: init brings its own model");
  f.require(!r.data.empty(), "data", "is missing: a run needs at least one [[data]]");
  f.require(!r.stages.empty(), "stage", "is missing: a run needs at least one [[stage]]");
  std::set<std::string> names;
  for (const DatasetOptions& d : r.data)
    f.require(names.insert(d.name).second, "data", fmt::format("two datasets are called \"{}\"", d.name));
  double total_share = 0, total_tokens = 0;
  for (size_t i = 0; i < r.stages.size(); ++i) {
    const StageOptions& s = r.stages[i];
    const std::string key = fmt::format("stage.{}.", i);
    double weight = 0;
    for (const auto& [name, w] : s.mix) {
      f.require(names.contains(name), key + "mix." + name,
                fmt::format("there is no dataset \"{}\"; known: {}", name, fmt::join(names, ", ")));
      weight += w;
    }
    if (s.mix.empty())
      for (const DatasetOptions& d : r.data) weight += d.weight;
    f.require(weight > 0, key + "mix", "the weights of the datasets sum to 0");
    f.require((s.time_share > 0) == (r.stages[0].time_share > 0), key + "time_share",
              "give every stage a time_share, or none");
    f.require(
        r.train.micro_batch_tokens == 0 || r.train.micro_batch_tokens >= s.context,
        "train.micro_batch_tokens",
        fmt::format("{} tokens are less than a sequence of stage {}, {}: a micro-batch is whole sequences",
                    r.train.micro_batch_tokens, s.name, s.context));
    total_share += s.time_share;
    total_tokens += static_cast<double>(s.steps) * static_cast<double>(s.batch_tokens);
  }
  f.require(total_tokens <= static_cast<double>(kMostTokens), "stage",
            fmt::format("the stages have {:.3g} tokens, more than {:.0e}", total_tokens,
                        static_cast<double>(kMostTokens)));
  f.require(total_share == 0 || std::abs(total_share - 1) < 1e-6, "stage",
            fmt::format("the time_share of the stages must sum to 1, got {}", total_share));
}

}  // namespace

void visit(Fields& f, ModelOptions& o) {
  f.value("name", o.name);
  f.json("override", o.override_json);
  const std::string unknown = unknown_config_key(nlohmann::json::parse(o.override_json));
  f.require(unknown.empty(), "override." + unknown, "no key of a model's configuration");
}

void visit(Fields& f, OptimizerOptions& o) {
  f.value("muon_lr", o.muon_lr, kNotNegative);
  f.value("adamw_lr", o.adamw_lr, kNotNegative);
  f.value("beta1", o.beta1, kShare);
  f.value("beta2", o.beta2, kShare);
  f.value("eps", o.eps, kPositive);
  f.value("weight_decay", o.weight_decay, kNotNegative);
  f.value("grad_clip", o.grad_clip, kNotNegative);
  f.value("momentum", o.momentum, kShare);
  f.value("nesterov", o.nesterov);
  f.value("ns_steps", o.ns_steps, {1, 100});
  f.value("update_scale", o.update_scale, kPositive);
  f.value("per_head", o.per_head);
  f.value("qk_clip", o.qk_clip, kNotNegative);
  f.require(o.beta1 < 1 && o.beta2 < 1, o.beta1 < 1 ? "beta2" : "beta1", "expected a number below 1, got 1");
  f.require(o.momentum < 1, "momentum", "expected a number below 1, got 1");
}

void visit(Fields& f, ScheduleOptions& o) {
  f.value("warmup", o.warmup, kShare);
  f.value("min_lr_ratio", o.min_lr_ratio, kShare);
}

void visit(Fields& f, BalanceOptions& o) {
  f.choice("method", o.method, {"quantile", "sign", "aux_loss", "none"});
  f.value("sign_rate", o.sign_rate, kNotNegative);
  f.value("aux_coefficient", o.aux_coefficient, kNotNegative);
  f.value("ema", o.ema, kShare);
  f.value("entropy_regularisation", o.entropy_regularisation, kNotNegative);
  f.value("window", o.window, kAtLeastOne);
  f.value("alarm_max_vio", o.alarm_max_vio, kNotNegative);
  f.value("alarm_dead_share", o.alarm_dead_share, kShare);
  f.value("alarm_entropy", o.alarm_entropy, kShare);
  f.value("alarm_steps", o.alarm_steps, kAtLeastOne);
  f.require(o.ema < 1, "ema", "expected a number below 1, got 1: the bias would never move");
}

void visit(Fields& f, CheckpointOptions& o) {
  f.value("every", o.every, kNotNegative);
  f.value("keep", o.keep, kNotNegative);
}

void visit(Fields& f, TrainOptions& o) {
  f.choice("dtype", o.dtype, {"f32", "bf16"});
  f.choice("recompute", o.recompute, {"none", "block"});
  f.value("micro_batch_tokens", o.micro_batch_tokens, kNotNegative);
  f.choice("nan_policy", o.nan_policy, {"stop", "skip", "roll_back"});
  f.choice("spike_policy", o.spike_policy, {"stop", "skip", "roll_back"});
  f.value("spike_nats", o.spike_nats, kNotNegative);
  f.value("fault_limit", o.fault_limit, kAtLeastOne);
  f.value("minutes", o.minutes, kNotNegative);
  f.value("time_limit_s", o.time_limit_s, kNotNegative);
  f.value("tensorboard", o.tensorboard);
}

void visit(Fields& f, DistOptions& o) {
  f.value("timeout_s", o.timeout_s, kPositive);
}

void visit(Fields& f, Recipe& r) {
  f.value("out", r.out);
  f.value("init", r.init);
  f.value("tokenizer", r.tokenizer);
  f.value("seed", r.seed, kNotNegative);
  f.table("model", [&](Fields& g) { visit(g, r.model); });
  f.tables("data", r.data, [&](Fields& g, size_t i) { visit(g, r.data[i]); });
  f.tables("stage", r.stages, [&](Fields& g, size_t i) { visit(g, r.stages[i], i); });
  f.table("optimizer", [&](Fields& g) { visit(g, r.optimizer); });
  f.table("schedule", [&](Fields& g) { visit(g, r.schedule); });
  f.table("balance", [&](Fields& g) { visit(g, r.balance); });
  f.table("checkpoint", [&](Fields& g) { visit(g, r.checkpoint); });
  f.table("eval", [&](Fields& g) { visit(g, r.eval); });
  f.table("train", [&](Fields& g) { visit(g, r.train); });
  f.table("dist", [&](Fields& g) { visit(g, r.dist); });
  check_across(f, r);
}

Recipe parse_recipe(std::string_view text, const std::string& name,
                    const std::vector<std::string>& overrides) {
  Recipe recipe;
  read_fields(text, name, overrides, [&](Fields& f) { visit(f, recipe); });
  if (recipe.out.empty()) recipe.out = "runs/" + std::filesystem::path(name).stem().string();
  return recipe;
}

Recipe load_recipe(const std::string& path, const std::vector<std::string>& overrides) {
  Recipe recipe;
  read_fields_file(path, overrides, [&](Fields& f) { visit(f, recipe); });
  if (recipe.out.empty()) recipe.out = "runs/" + std::filesystem::path(path).stem().string();
  return recipe;
}

std::string to_toml(const Recipe& recipe) {
  Recipe copy = recipe;  // a visit may write
  return write_fields([&](Fields& f) { visit(f, copy); });
}

}  // namespace godwit
