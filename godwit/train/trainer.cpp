#include "godwit/train/trainer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <deque>
#include <numeric>

#include "godwit/base/check.h"
#include "godwit/base/log.h"
#include "godwit/base/progress.h"
#include "godwit/io/file.h"
#include "godwit/model/checkpoint.h"
#include "godwit/train/checkpoint.h"
#include "godwit/train/metrics.h"
#include "godwit/train/resume.h"
#include "godwit/train/schedule.h"
#include "godwit/train/setup.h"
#include "godwit/train/step.h"

namespace godwit {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
constexpr size_t kRecentSteps = 20;  // for means over "the last steps"

volatile std::sig_atomic_t g_stop = 0;

// SIGTERM and SIGINT ask the run to save and end; the old handlers come back with the object.
class StopSignals {
 public:
  StopSignals() {
    g_stop = 0;
    struct sigaction action = {};
    action.sa_handler = [](int) { g_stop = 1; };
    sigaction(SIGTERM, &action, &old_term_);
    sigaction(SIGINT, &action, &old_int_);
  }
  ~StopSignals() {
    sigaction(SIGTERM, &old_term_, nullptr);
    sigaction(SIGINT, &old_int_, nullptr);
  }

 private:
  struct sigaction old_term_ = {}, old_int_ = {};
};

double mean(const std::deque<double>& values) {
  return values.empty()
             ? 0.0
             : std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

void remember(std::deque<double>& values, double value) {
  values.push_back(value);
  if (values.size() > kRecentSteps) values.pop_front();
}

class Run {
 public:
  Run(const Recipe& recipe, const RunOptions& options)
      : recipe_(recipe),
        options_(options),
        out_(recipe.out),
        data_(open_data(recipe)),
        config_(resolve_model(recipe, data_)),
        plan_(plan_stages(recipe)),
        weights_(initial_weights()),
        step_(recipe_, config_, weights_, options.device),
        metrics_({.directory = out_, .tensorboard = recipe.train.tensorboard}) {
    set_requires_grad(config_, weights_, true);
  }

  RunSummary run();

 private:
  ModelWeights initial_weights();
  void prepare_directory();
  void resume();
  void check_same_recipe(const Recipe& saved);
  void run_stage(size_t stage);
  void one_step(size_t stage, const data::PackedLoader& loader, const ModelConfig& config, int64_t local);
  void begin_row(size_t stage, double multiplier, const StepResult& result, double seconds);
  void evaluate_into_row(size_t stage, bool run_ends);
  void check_gate(size_t stage);
  HeldOutLoss evaluate(int64_t context, int64_t max_tokens);
  void save(size_t stage, int64_t local);
  void save_model();
  StateMap state();
  double here() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  double elapsed() const { return elapsed_before_ + here(); }
  double stage_progress(size_t stage, int64_t done) const {
    return progress_after(plan_[stage], done, elapsed(), recipe_.train.minutes * 60.0);
  }
  bool asked_to_stop() const {
    return g_stop || (recipe_.train.time_limit_s > 0 && here() > recipe_.train.time_limit_s);
  }

  const Recipe& recipe_;
  RunOptions options_;
  fs::path out_;
  RunData data_;
  ModelConfig config_;
  std::vector<StagePlan> plan_;
  ModelWeights weights_;
  TrainStep step_;
  MetricsWriter metrics_;
  RunSummary summary_;
  Clock::time_point start_ = Clock::now();
  double elapsed_before_ = 0;  // of the runs that this one resumes
  size_t first_stage_ = 0;     // where to begin, with the steps done in that stage
  int64_t first_local_ = 0;
  int64_t steps_done_ = 0;
  int64_t tokens_done_ = 0;
  double gate_reference_ = 0;  // held-out loss at the earlier context when the current stage began
  bool stopped_ = false;
  nlohmann::json row_;  // of the step that was just made; written when its evaluation is in it
  std::deque<double> losses_, max_vios_;
};

ModelWeights Run::initial_weights() {
  const at::ScalarType dtype = recipe_.train.dtype == TrainDtype::kBf16 ? at::kBFloat16 : at::kFloat;
  if (!recipe_.init.empty()) return load_weights(config_, recipe_.init, options_.device, dtype);
  return init_weights(config_, static_cast<uint64_t>(recipe_.seed), options_.device, dtype);
}

void Run::prepare_directory() {
  const bool used = fs::exists(out_ / "metrics.jsonl") || fs::exists(out_ / "checkpoints");
  check(options_.resume || !used,
        "{} holds a run already: --resume goes on with it, another `out` starts anew", out_.string());
  if (options_.resume) resume();
  io::make_directories(out_);
  for (const char* name : {"recipe.toml", "model"}) io::remove_temporaries(out_ / name);
  io::write_file_atomic(out_ / "recipe.toml", to_toml(recipe_));
}

StateMap Run::state() {
  StateMap all;
  const auto add = [&](const std::string& prefix, const StateMap& part) {
    for (const auto& [name, tensor] : part) all.emplace(prefix + name, tensor);
  };
  for_each_param(config_, weights_, [&](const ParamInfo& info, at::Tensor& value) {
    all.emplace("weights." + info.name, value.detach());
  });
  add("optimizer.",
      collect_state([&](const StateVisitor& visit) { step_.optimizer().for_each_state(visit); }));
  add("balance.", collect_state([&](const StateVisitor& visit) { step_.balancer().for_each_state(visit); }));
  return all;
}

void Run::check_same_recipe(const Recipe& saved) {
  std::string honoured, refused;
  for (const RecipeChange& change : recipe_changes(saved, recipe_)) {
    std::string& list = change.honoured ? honoured : refused;
    list += (list.empty() ? "" : "; ") + change.text();
  }
  check(
      refused.empty(),
      "{}: --resume cannot change what the steps so far were made with: {}. Resume without these changes, or "
      "start a new run from the weights with init = \"{}\"",
      out_.string(), refused, (out_ / "model").string());
  if (!honoured.empty())
    log_info("{}: the recipe differs from the checkpoint's in {}", out_.string(), honoured);
}

void Run::resume() {
  const auto found = load_newest_checkpoint(out_ / "checkpoints");
  if (!found) {
    log_info("no checkpoint in {}: starting from the beginning", out_.string());
    metrics_.truncate_after(0);
    return;
  }
  check_same_recipe(parse_recipe(found->meta.at("recipe").get<std::string>(), "the checkpoint's recipe"));
  load_state_strict(
      "checkpoint",
      [&](const StateVisitor& visit) {
        for (auto& [name, tensor] : state()) visit(name, tensor);
      },
      found->tensors);
  first_stage_ = found->meta.at("stage").get<size_t>();
  first_local_ = found->meta.at("stage_step").get<int64_t>();
  steps_done_ = found->step;
  tokens_done_ = found->meta.at("tokens").get<int64_t>();
  elapsed_before_ = found->meta.at("elapsed_s").get<double>();
  gate_reference_ = found->meta.at("gate_reference").get<double>();
  for (const double v : found->meta.at("recent_losses")) losses_.push_back(v);
  for (const double v : found->meta.at("recent_max_vio")) max_vios_.push_back(v);
  summary_.first_max_vio = found->meta.at("first_max_vio").get<double>();
  summary_.before.nats_per_token = found->meta.at("before").at("nats_per_token").get<double>();
  summary_.before.bits_per_byte = found->meta.at("before").at("bits_per_byte").get<double>();
  summary_.before.tokens = found->meta.at("before").at("tokens").get<int64_t>();
  metrics_.truncate_after(steps_done_);
  log_info("resuming at step {} (stage {}, step {} of it)", steps_done_, recipe_.stages[first_stage_].name,
           first_local_);
}

void Run::save(size_t stage, int64_t local) {
  Checkpoint c{.step = steps_done_, .meta = {}, .tensors = state()};
  c.meta = {{"recipe", to_toml(recipe_)},
            {"stage", stage},
            {"stage_step", local},
            {"tokens", tokens_done_},
            {"elapsed_s", elapsed()},
            {"gate_reference", gate_reference_},
            {"recent_losses", losses_},
            {"recent_max_vio", max_vios_},
            {"first_max_vio", summary_.first_max_vio},
            {"before",
             {{"nats_per_token", summary_.before.nats_per_token},
              {"bits_per_byte", summary_.before.bits_per_byte},
              {"tokens", summary_.before.tokens}}}};
  metrics_.flush();
  save_checkpoint(out_ / "checkpoints", c, recipe_.checkpoint.keep);
}

void Run::save_model() {
  ModelConfig saved = stage_config(config_, recipe_.stages.back());
  io::AtomicDirectory directory(out_ / "model", io::AtomicDirectory::Existing::kReplace);
  save_weights(saved, weights_, directory.temporary().string());
  const std::string tokenizer = recipe_.tokenizer.empty() ? recipe_.init : recipe_.tokenizer;
  for (const char* name : {"tiktoken.model", "tokenizer_config.json"}) {
    if (!tokenizer.empty() && fs::exists(fs::path(tokenizer) / name)) {
      fs::copy_file(fs::path(tokenizer) / name, directory.temporary() / name);
    }
  }
  directory.commit();
}

HeldOutLoss Run::evaluate(int64_t context, int64_t max_tokens) {
  if (data_.held_out.empty()) return {};
  return held_out_loss(config_, weights_, data_.held_out.front(), context, max_tokens, options_.device);
}

void Run::begin_row(size_t stage, double multiplier, const StepResult& result, double seconds) {
  row_ = {{"step", steps_done_},
          {"stage", recipe_.stages[stage].name},
          {"context", recipe_.stages[stage].context},
          {"tokens", tokens_done_},
          {"loss", result.loss},
          {"lr", multiplier * recipe_.optimizer.muon_lr},
          {"grad_norm", result.grad_norm},
          {"tokens_per_s", static_cast<double>(result.tokens) / seconds},
          {"max_logit", result.max_logit},
          {"clipped_heads", result.clipped_heads},
          {"activation_rms", result.activation_rms}};
  for (const char* list : {"max_vio", "dead_experts", "entropy", "flip_rate"})
    row_[list] = nlohmann::json::array();
  for (const LayerBalance& layer : result.balance.layers) {
    row_["max_vio"].push_back(layer.batch.max_vio);
    row_["dead_experts"].push_back(layer.batch.dead_experts);
    row_["entropy"].push_back(layer.batch.entropy);
    row_["flip_rate"].push_back(layer.flip_rate);
  }
}

void Run::one_step(size_t stage, const data::PackedLoader& loader, const ModelConfig& config, int64_t local) {
  const double multiplier = lr_multiplier(recipe_.schedule, stage_progress(stage, local + 1));
  const auto begin = Clock::now();
  const StepResult result = step_.run(config, loader, local, multiplier);
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  ++steps_done_;
  tokens_done_ += result.tokens;
  begin_row(stage, multiplier, result, seconds);
  if (!result.applied) {
    check(recipe_.train.nan_policy == NanPolicy::kSkip,
          "step {} (stage {}): {} is not finite; the newest checkpoint is untouched", steps_done_,
          recipe_.stages[stage].name, result.not_finite);
    log_warn("step {}: {} is not finite, the step is skipped", steps_done_, result.not_finite);
    row_["skipped"] = result.not_finite;
    return;
  }
  if (summary_.first_max_vio == 0) summary_.first_max_vio = result.balance.max_vio();
  remember(losses_, result.loss);
  remember(max_vios_, result.balance.max_vio());
  summary_.dead_experts = 0;
  for (const LayerBalance& layer : result.balance.layers)
    summary_.dead_experts = std::max(summary_.dead_experts, layer.windowed_dead);
  for (const std::string& alarm : result.balance.alarms) log_warn("step {}: {}", steps_done_, alarm);
}

// The run ends with evaluations of its own, at the first and at the last stage's context.
void Run::evaluate_into_row(size_t stage, bool run_ends) {
  HeldOutLoss held;
  if (run_ends) {
    summary_.after = held = evaluate(recipe_.stages.front().context, 0);
  } else if (recipe_.eval.every > 0 && steps_done_ % recipe_.eval.every == 0) {
    const int64_t context = recipe_.eval.context > 0 ? recipe_.eval.context : recipe_.stages[stage].context;
    held = evaluate(context, recipe_.eval.tokens);
  }
  if (held.tokens == 0) return;
  row_["eval_context"] = held.context;
  row_["held_out_loss"] = held.nats_per_token;
  row_["bits_per_byte"] = held.bits_per_byte;
}

void Run::check_gate(size_t stage) {
  const StageOptions& options = recipe_.stages[stage];
  if (stage == 0 || !std::isfinite(options.gate) || data_.held_out.empty()) return;
  StageSummary& s = summary_.stages.back();
  s.gate_before = gate_reference_;
  s.gate_after = evaluate(recipe_.stages[stage - 1].context, recipe_.eval.tokens).nats_per_token;
  check(s.gate_after - s.gate_before <= options.gate,
        "stage {}: the held-out loss at context {} rose from {:.4f} to {:.4f} nats, more than the gate "
        "allows ({}); stopped, checkpoint step-{} holds "
        "the weights",
        options.name, recipe_.stages[stage - 1].context, s.gate_before, s.gate_after, options.gate,
        steps_done_);
}

// The state is saved after the step's row is complete, and after the stage's last step before its gate: a run
// that resumes does what is left, and nothing twice.
void Run::run_stage(size_t stage) {
  const StageOptions& options = recipe_.stages[stage];
  const ModelConfig config = stage_config(config_, options);
  const auto loader = stage_loader(recipe_, data_, stage);
  const bool fresh = first_local_ == 0 || stage != first_stage_;
  if (fresh && stage > 0 && std::isfinite(options.gate)) {
    gate_reference_ = evaluate(recipe_.stages[stage - 1].context, recipe_.eval.tokens).nats_per_token;
  }
  const int64_t begin = fresh ? 0 : first_local_;
  const double began = elapsed();
  const int64_t tokens_before = tokens_done_;
  ProgressBar bar(
      {.label = fmt::format("{} {}", options.name, options.context), .total = options.steps, .done = begin});
  int64_t local = begin;
  bool ended = stage_progress(stage, local) >= plan_[stage].end;
  while (!ended && !stopped_) {
    const double step_began = elapsed();
    one_step(stage, *loader, config, local++);
    ended = stage_progress(stage, local) >= plan_[stage].end;
    const double rate = static_cast<double>(options.batch_tokens) / (elapsed() - step_began);
    bar.update(local,
               fmt::format("loss {:.3f}  MaxVio {:.2f}  {:.0f} tok/s", losses_.empty() ? NAN : losses_.back(),
                           max_vios_.empty() ? NAN : max_vios_.back(), rate));
    evaluate_into_row(stage, ended && stage + 1 == recipe_.stages.size());
    metrics_.write(row_);
    stopped_ = !ended && asked_to_stop();
    const bool due = recipe_.checkpoint.every > 0 && steps_done_ % recipe_.checkpoint.every == 0;
    if (ended || stopped_ || due) save(stage, local);
  }
  bar.finish();
  summary_.stages.push_back({.name = options.name,
                             .context = options.context,
                             .steps = local - begin,
                             .tokens = tokens_done_ - tokens_before,
                             .seconds = elapsed() - began,
                             .loss = mean(losses_)});
  if (!stopped_) check_gate(stage);
}

RunSummary Run::run() {
  prepare_directory();
  for_each_param(config_, weights_,
                 [&](const ParamInfo&, at::Tensor& value) { summary_.parameters += value.numel(); });
  log_info("{}: {:.2f} M parameters, {} stages, {} steps", out_.string(),
           static_cast<double>(summary_.parameters) * 1e-6, recipe_.stages.size(),
           plan_.back().first_step + plan_.back().steps);
  if (steps_done_ == 0) summary_.before = evaluate(recipe_.stages.front().context, 0);
  for (size_t stage = first_stage_; stage < recipe_.stages.size() && !stopped_; ++stage) run_stage(stage);
  summary_.finished = !stopped_;
  summary_.steps = steps_done_;
  summary_.tokens = tokens_done_;
  summary_.last_max_vio = mean(max_vios_);
  save_model();
  if (summary_.finished) {
    if (summary_.after.tokens == 0) summary_.after = evaluate(recipe_.stages.front().context, 0);
    summary_.longest = evaluate(recipe_.stages.back().context, 0);
  }
  metrics_.flush();
  summary_.seconds = elapsed();
  return summary_;
}

}  // namespace

RunSummary run_training(const Recipe& recipe, const RunOptions& options) {
  const StopSignals signals;
  Run run(recipe, options);
  return run.run();
}

}  // namespace godwit
