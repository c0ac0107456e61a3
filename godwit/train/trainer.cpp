#include "godwit/train/trainer.h"

#include <malloc.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <memory>
#include <numeric>
#include <optional>

#include "godwit/base/check.h"
#include "godwit/base/log.h"
#include "godwit/base/progress.h"
#include "godwit/base/stop_signals.h"
#include "godwit/io/file.h"
#include "godwit/model/checkpoint.h"
#include "godwit/ops/block_pool.h"
#include "godwit/train/checkpoint.h"
#include "godwit/train/metrics.h"
#include "godwit/train/position.h"
#include "godwit/train/record.h"
#include "godwit/train/resume.h"
#include "godwit/train/schedule.h"
#include "godwit/train/setup.h"
#include "godwit/train/step.h"

namespace godwit {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
constexpr size_t kRecentSteps = 20;  // for means over "the last steps"

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
  Run(const Recipe& recipe, const RunOptions& options, dist::Group& group)
      : recipe_(recipe),
        options_(options),
        group_(group),
        out_(recipe.out),
        data_(open_data(recipe)),
        config_(resolve_model(recipe, data_)),
        plan_(plan_stages(recipe)),
        weights_(initial_weights()),
        step_(recipe_, config_, weights_, options.device, group),
        metrics_({.directory = out_, .tensorboard = recipe.train.tensorboard}) {
    set_requires_grad(config_, weights_, true);
    at_.passed_over.assign(recipe.stages.size(), 0);
  }

  RunSummary run();

 private:
  enum class Outcome { kMade, kSkipped, kRolledBack };

  ModelWeights initial_weights();
  void prepare_directory();
  bool load_checkpoint();
  void share_state();
  void check_same_recipe(const Recipe& saved);
  void run_stage();
  Outcome one_step(const data::PackedLoader& loader, const ModelConfig& config);
  Outcome handle_fault(const StepResult& result);
  void roll_back(int64_t next_batch, size_t stage);
  void begin_row(double multiplier, const StepResult& result, double seconds);
  void finish_row(bool run_ends);
  std::string progress_text(const StepResult& result) const;
  void check_gate();
  HeldOutLoss evaluate(int64_t context, int64_t max_tokens);
  void save();
  void save_model();
  StateMap state();

  const StageOptions& stage() const { return recipe_.stages[at_.stage]; }
  bool last_stage() const { return at_.stage + 1 == recipe_.stages.size(); }
  double here() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  double elapsed() const { return elapsed_before_ + here(); }
  // With a time budget the ranks go by rank 0's clock.
  double progress_at(int64_t stage_step) const {
    return progress_after(plan_[at_.stage], stage_step, clock_, recipe_.train.minutes * 60.0);
  }
  bool stage_ended() {
    if (recipe_.train.minutes > 0) clock_ = group_.broadcast(std::vector<double>{elapsed()})[0];
    return progress_at(at_.stage_step) >= plan_[at_.stage].end;
  }
  bool asked_to_stop() {
    return group_.any(StopSignals::asked() ||
                      (recipe_.train.time_limit_s > 0 && here() > recipe_.train.time_limit_s));
  }

  const Recipe& recipe_;
  RunOptions options_;
  dist::Group& group_;
  fs::path out_;
  RunData data_;
  ModelConfig config_;
  std::vector<StagePlan> plan_;
  ModelWeights weights_;
  TrainStep step_;
  std::optional<io::DirectoryLock> lock_;  // rank 0's, of the run directory
  MetricsWriter metrics_;
  RunSummary summary_;
  RunPosition at_;
  Clock::time_point start_ = Clock::now();
  double elapsed_before_ = 0;  // of the runs that this one resumes
  double clock_ = 0;           // seconds of the whole run, the same on all ranks
  bool stopped_ = false;
  int64_t skipped_in_a_row_ = 0, returns_ = 0;  // returns: to the newest checkpoint
  nlohmann::json row_;              // of the step that was just made; written when its evaluation is in it
  std::optional<ProgressBar> bar_;  // rank 0's
};

ModelWeights Run::initial_weights() {
  const at::ScalarType dtype = recipe_.train.dtype == TrainDtype::kBf16 ? at::kBFloat16 : at::kFloat;
  if (!recipe_.init.empty()) return load_weights(config_, recipe_.init, options_.device, dtype);
  return init_weights(config_, static_cast<uint64_t>(recipe_.seed), options_.device, dtype);
}

// The run directory is rank 0's alone.
void Run::prepare_directory() {
  if (group_.root()) {
    const dist::Group::Busy busy(group_);
    const bool used = fs::exists(out_ / "metrics.jsonl") || fs::exists(out_ / "checkpoints");
    check(options_.resume || !used,
          "{} holds a run already: --resume goes on with it, another `out` starts anew", out_.string());
    io::make_directories(out_);
    lock_.emplace(out_);
    if (options_.resume && load_checkpoint()) {
      log_info("resuming at step {} (stage {}, step {} of it)", at_.steps, stage().name, at_.stage_step);
    } else if (options_.resume) {
      log_info("no checkpoint in {}: starting from the beginning", out_.string());
      metrics_.truncate_after(0);
    }
    for (const char* name : {"recipe.toml", "model"}) io::remove_temporaries(out_ / name);
    io::write_file_atomic(out_ / "recipe.toml", to_toml(recipe_));
  }
  share_state();
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

// Everything that the next step depends on, from rank 0 to all.
void Run::share_state() {
  if (group_.size() == 1) return;
  at_ = nlohmann::json::parse(group_.broadcast(nlohmann::json(at_).dump())).get<RunPosition>();
  for (auto& [name, tensor] : state()) group_.broadcast(tensor);
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

std::vector<std::string> fingerprints(
    const std::vector<std::shared_ptr<const data::TokenDataset>>& datasets) {
  std::vector<std::string> all;
  for (const auto& dataset : datasets) all.push_back(io::hex64(dataset->fingerprint()));
  return all;
}

// The newest checkpoint that verifies, and the metrics up to it. False: there is none.
bool Run::load_checkpoint() {
  const auto found = load_newest_checkpoint(out_ / "checkpoints");
  if (!found) return false;
  check_same_recipe(parse_recipe(found->meta.at("recipe").get<std::string>(), "the checkpoint's recipe"));
  const auto saved = found->meta.at("data").get<std::vector<std::string>>();
  const std::vector<std::string> given = fingerprints(data_.train);
  for (size_t i = 0; i < given.size(); ++i)
    check(saved.at(i) == given[i],
          "{}: --resume: {} does not hold the data that the steps so far were made with (fingerprint {}, was "
          "{})",
          out_.string(), recipe_.data[i].path, given[i], saved[i]);
  load_state_strict(
      "checkpoint",
      [&](const StateVisitor& visit) {
        for (auto& [name, tensor] : state()) visit(name, tensor);
      },
      found->tensors);
  at_ = found->meta.at("position").get<RunPosition>();
  elapsed_before_ = std::max(elapsed_before_, at_.elapsed_s - here());
  metrics_.truncate_after(at_.steps);
  return true;
}

void Run::save() {
  returns_ = 0;
  if (!group_.root()) return;
  const dist::Group::Busy busy(group_);
  at_.elapsed_s = elapsed();
  const ModelConfig config = stage_config(config_, stage());
  const Checkpoint c{.step = at_.steps,
                     .meta = {{"recipe", to_toml(recipe_)},
                              {"data", fingerprints(data_.train)},
                              {"config", to_json(config)},
                              {"position", at_}},
                     .tensors = state()};
  metrics_.flush();
  save_checkpoint(out_ / "checkpoints", c, recipe_.checkpoint.keep);
}

void Run::save_model() {
  if (!group_.root()) return;
  const dist::Group::Busy busy(group_);
  ModelConfig saved = stage_config(config_, recipe_.stages.back());
  io::AtomicDirectory directory(out_ / "model", io::AtomicDirectory::Existing::kReplace);
  save_weights(saved, weights_, directory.temporary().string());
  const std::string tokenizer = recipe_.tokenizer.empty() ? recipe_.init : recipe_.tokenizer;
  for (const char* name : {"tiktoken.model", "tokenizer_config.json"}) {
    if (!tokenizer.empty() && fs::exists(fs::path(tokenizer) / name)) {
      fs::copy_file(fs::path(tokenizer) / name, directory.temporary() / name);
    }
  }
  if (data_.processor)
    io::save_image_processor(*data_.processor, directory.temporary());
  else if (const fs::path file = fs::path(recipe_.init) / io::kImageProcessorFile;
           !recipe_.init.empty() && fs::exists(file))
    fs::copy_file(file, directory.temporary() / io::kImageProcessorFile);
  directory.commit();
}

// Rank 0 measures, all know (but for the loss by position).
HeldOutLoss Run::evaluate(int64_t context, int64_t max_tokens) {
  if (data_.held_out.empty()) return {};
  HeldOutLoss held;
  if (group_.root()) {
    const dist::Group::Busy busy(group_);
    held = held_out_loss(config_, weights_, data_.held_out.front(), context, max_tokens, options_.device);
  }
  const std::vector<double> shared = group_.broadcast(
      std::vector<double>{held.nats_per_token, held.bits_per_byte, static_cast<double>(held.tokens)});
  held.context = context;
  held.nats_per_token = shared[0];
  held.bits_per_byte = shared[1];
  held.tokens = static_cast<int64_t>(shared[2]);
  return held;
}

void Run::begin_row(double multiplier, const StepResult& result, double seconds) {
  row_ = {{"step", at_.steps},
          {"stage", stage().name},
          {"context", stage().context},
          {"tokens", at_.tokens},
          {"loss", result.loss},
          {"lr", multiplier * recipe_.optimizer.muon_lr},
          {"grad_norm", result.grad_norm},
          {"tokens_per_s", static_cast<double>(result.tokens) / seconds},
          {"max_logit", result.max_logit},
          {"clipped_heads", result.clipped_heads},
          {"activation_rms", result.activation_rms},
          {"grad_norms", result.layer_grad_norms}};
  const StepSeconds& s = result.seconds;
  row_["seconds"] = {{"data", s.data},
                     {"passes", s.passes},
                     {"sum", s.sum},
                     {"optimizer", s.optimizer},
                     {"balance", s.balance}};
  for (const char* list : {"max_vio", "dead_experts", "entropy", "flip_rate"})
    row_[list] = nlohmann::json::array();
  for (const LayerBalance& layer : result.balance.layers) {
    row_["max_vio"].push_back(layer.batch.max_vio);
    row_["dead_experts"].push_back(layer.batch.dead_experts);
    row_["entropy"].push_back(layer.batch.entropy);
    row_["flip_rate"].push_back(layer.flip_rate);
  }
  if (config_.vision) row_["vision_grad_norm"] = result.vision_grad_norm;
  if (!result.balance.alarms.empty()) row_["alarms"] = result.balance.alarms;
  if (result.fault != StepFault::kNone) row_["skipped"] = result.what;
}

Run::Outcome Run::one_step(const data::PackedLoader& loader, const ModelConfig& config) {
  if (options_.before_step) options_.before_step(at_.steps + 1, weights_);
  const double multiplier = lr_multiplier(recipe_.schedule, progress_at(at_.stage_step + 1));
  const bool watch = recipe_.train.spike_nats > 0 && at_.recent_losses.size() == kRecentSteps;
  const int64_t batch = at_.stage_step + at_.passed_over[at_.stage];
  const auto begin = Clock::now();
  const StepResult result =
      step_.run({.config = config,
                 .loader = loader,
                 .batch = batch,
                 .lr_multiplier = multiplier,
                 .expected_loss = watch ? mean(at_.recent_losses) : 0.0,
                 .spike_nats = watch ? recipe_.train.spike_nats : std::numeric_limits<double>::infinity()});
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  ++at_.steps;
  ++at_.stage_step;
  at_.tokens += result.tokens;
  if (result.fault != StepFault::kNone) {
    const Outcome outcome = handle_fault(result);
    if (outcome == Outcome::kRolledBack) roll_back(batch + 1, at_.stage);
    if (outcome == Outcome::kSkipped) begin_row(multiplier, result, seconds);
    return outcome;
  }
  skipped_in_a_row_ = 0;
  begin_row(multiplier, result, seconds);
  if (at_.first_max_vio == 0) at_.first_max_vio = result.balance.max_vio();
  remember(at_.recent_losses, result.loss);
  remember(at_.recent_max_vio, result.balance.max_vio());
  summary_.dead_experts = 0;
  for (const LayerBalance& layer : result.balance.layers)
    summary_.dead_experts = std::max(summary_.dead_experts, layer.windowed_dead);
  if (result.balance.remind && group_.root()) {
    for (const std::string& alarm : result.balance.alarms) log_warn("step {}: {}", at_.steps, alarm);
  }
  if (bar_) bar_->update(at_.stage_step, progress_text(result));
  return Outcome::kMade;
}

std::string Run::progress_text(const StepResult& result) const {
  const size_t alarms = result.balance.alarms.size();
  return fmt::format("loss {:.3f}  MaxVio {:.2f}  {:.0f} tok/s{}", result.loss, result.balance.max_vio(),
                     row_.at("tokens_per_s").get<double>(),
                     alarms > 0 ? fmt::format("  ALARM x{}", alarms) : "");
}

// What the recipe says to do about a step that changed nothing. Throws where the run is to stop.
Run::Outcome Run::handle_fault(const StepResult& result) {
  const bool spike = result.fault == StepFault::kSpike;
  const FaultPolicy policy = spike ? recipe_.train.spike_policy : recipe_.train.nan_policy;
  const std::string what = fmt::format("step {} (stage {}): {}", at_.steps, stage().name, result.what);
  check(policy != FaultPolicy::kStop, "{}; stopped, the newest checkpoint is untouched", what);
  if (policy == FaultPolicy::kSkip) {
    ++skipped_in_a_row_;
    check(skipped_in_a_row_ < recipe_.train.fault_limit, "{}; stopped after {} such steps in a row", what,
          skipped_in_a_row_);
    if (group_.root()) log_warn("{}; the step is skipped", what);
    return Outcome::kSkipped;
  }
  ++returns_;
  check(returns_ < recipe_.train.fault_limit, "{}; stopped after {} returns to one checkpoint", what,
        returns_);
  if (group_.root()) log_warn("{}; back to the newest checkpoint, past the batches since", what);
  return Outcome::kRolledBack;
}

// Goes on from the newest checkpoint with batch `next_batch` of `stage`: what lies between is passed over.
void Run::roll_back(int64_t next_batch, size_t faulty) {
  if (group_.root()) {
    const dist::Group::Busy busy(group_);
    check(load_checkpoint(), "{}: there is no checkpoint to go back to", out_.string());
    at_.passed_over[faulty] = next_batch - (at_.stage == faulty ? at_.stage_step : 0);
  }
  share_state();
}

// The run ends with evaluations of its own, at the first and at the last stage's context.
void Run::finish_row(bool run_ends) {
  HeldOutLoss held;
  if (run_ends) {
    summary_.after = held = evaluate(recipe_.stages.front().context, 0);
  } else if (recipe_.eval.every > 0 && at_.steps % recipe_.eval.every == 0) {
    held = evaluate(recipe_.eval.context > 0 ? recipe_.eval.context : stage().context, recipe_.eval.tokens);
  }
  if (!group_.root()) return;
  if (held.tokens > 0) {
    row_["eval_context"] = held.context;
    row_["held_out_loss"] = held.nats_per_token;
    row_["bits_per_byte"] = held.bits_per_byte;
  }
  metrics_.write(row_);
}

void Run::check_gate() {
  if (at_.stage == 0 || !std::isfinite(stage().gate) || data_.held_out.empty()) return;
  StageSummary& s = summary_.stages.back();
  const int64_t context = recipe_.stages[at_.stage - 1].context;
  s.gate_before = at_.gate_reference;
  s.gate_after = evaluate(context, recipe_.eval.tokens).nats_per_token;
  if (group_.root())
    RunRecord(out_).gate({.stage = stage().name,
                          .context = context,
                          .step = at_.steps,
                          .before = s.gate_before,
                          .after = s.gate_after,
                          .limit = stage().gate});
  check(s.gate_after - s.gate_before <= stage().gate,
        "stage {}: the held-out loss at context {} rose from {:.4f} to {:.4f} nats, more than the gate "
        "allows ({}); stopped, checkpoint step-{} holds the weights",
        stage().name, context, s.gate_before, s.gate_after, stage().gate, at_.steps);
}

// From where the run stands to the end of the stage. The state is saved after the step's row is complete, and
// after the stage's last step before its gate: a run that resumes does what is left, and nothing twice. A
// return to a checkpoint may end in an earlier stage.
void Run::run_stage() {
  const size_t me = at_.stage;
  const ModelConfig config = stage_config(config_, stage());
  const auto loader = stage_loader(recipe_, data_, me);
  if (at_.stage_step == 0 && me > 0 && std::isfinite(stage().gate))
    at_.gate_reference = evaluate(recipe_.stages[me - 1].context, recipe_.eval.tokens).nats_per_token;
  const int64_t begin = at_.stage_step, tokens_before = at_.tokens;
  const double began = elapsed();
  if (group_.root()) {
    bar_.emplace(ProgressOptions{
        .label = fmt::format("{} {}", stage().name, stage().context), .total = stage().steps, .done = begin});
  }
  bool ended = stage_ended();
  while (!ended && !stopped_) {
    if (one_step(*loader, config) == Outcome::kRolledBack) {
      if (at_.stage != me) return bar_.reset();
      continue;
    }
    ended = stage_ended();
    finish_row(ended && last_stage());
    stopped_ = !ended && asked_to_stop();
    const bool due = recipe_.checkpoint.every > 0 && at_.steps % recipe_.checkpoint.every == 0;
    if (ended || stopped_ || due) save();
  }
  if (bar_) bar_->finish();
  bar_.reset();
  summary_.stages.push_back({.name = stage().name,
                             .context = stage().context,
                             .steps = at_.stage_step - begin,
                             .tokens = at_.tokens - tokens_before,
                             .seconds = elapsed() - began,
                             .loss = mean(at_.recent_losses)});
  if (group_.root()) RunRecord(out_).expert_load(step_.balancer().recent_loads());
  if (stopped_) return;
  check_gate();
  ++at_.stage;
  at_.stage_step = 0;
}

RunSummary Run::run() {
  prepare_directory();
  for_each_param(config_, weights_,
                 [&](const ParamInfo&, at::Tensor& value) { summary_.parameters += value.numel(); });
  if (group_.root()) {
    log_info("{}: {:.2f} M parameters, {} stages, {} steps, {} process{}", out_.string(),
             static_cast<double>(summary_.parameters) * 1e-6, recipe_.stages.size(),
             plan_.back().first_step + plan_.back().steps, group_.size(), group_.size() > 1 ? "es" : "");
  }
  if (at_.steps == 0) {
    at_.before = evaluate(recipe_.stages.front().context, 0);
    const bool may_return =
        recipe_.train.nan_policy == FaultPolicy::kRollBack ||
        (recipe_.train.spike_nats > 0 && recipe_.train.spike_policy == FaultPolicy::kRollBack);
    if (may_return) save();
  }
  while (at_.stage < recipe_.stages.size() && !stopped_) run_stage();
  summary_.finished = !stopped_;
  summary_.steps = at_.steps;
  summary_.tokens = at_.tokens;
  summary_.before = at_.before;
  summary_.first_max_vio = at_.first_max_vio;
  summary_.last_max_vio = mean(at_.recent_max_vio);
  save_model();
  if (summary_.finished) {
    if (summary_.after.tokens == 0) summary_.after = evaluate(recipe_.stages.front().context, 0);
    summary_.longest = evaluate(recipe_.stages.back().context, 0);
  }
  if (group_.root()) {
    if (summary_.longest.tokens > 0) RunRecord(out_).loss_by_position(summary_.longest.by_position);
    metrics_.flush();
  }
  summary_.seconds = elapsed();
  return summary_;
}

// Before anything is summed: ranks with different recipes would train on, each its own way.
void check_same_on_all_ranks(const Recipe& recipe, dist::Group& group) {
  if (group.size() == 1) return;
  const Recipe root = parse_recipe(group.broadcast(to_toml(recipe)), "rank 0's recipe");
  std::string changed;
  for (const RecipeChange& change : recipe_changes(root, recipe))
    if (!change.honoured) changed += (changed.empty() ? "" : "; ") + change.text();
  std::optional<std::string> fault;
  if (!changed.empty())
    fault = fmt::format("rank {} has another recipe than rank 0: {}", group.rank(), changed);
  if (const auto first = group.first(fault)) fail("{}", *first);
}

}  // namespace

RunSummary run_training(const Recipe& recipe, const RunOptions& options) {
  // Recomputing saves memory for time, and so does this: blocks of a MiB and more come from the system and go
  // back to it. glibc's heap would more than double the peak, holes between the gradients (docs/plan.md).
  if (recipe.train.recompute == Recompute::kBlock) ::mallopt(M_MMAP_THRESHOLD, 1 << 20);
  if (options.device.is_cpu()) ops::use_block_pool();
  const StopSignals signals;
  dist::Group alone;
  dist::Group& group = options.group != nullptr ? *options.group : alone;
  try {
    check_same_on_all_ranks(recipe, group);
    auto setting_up = std::make_unique<dist::Group::Busy>(group);
    Run run(recipe, options, group);
    setting_up.reset();
    RunSummary summary = run.run();
    group.close();
    return summary;
  } catch (const std::exception& error) {
    group.fail_all(error.what());
    throw;
  }
}

}  // namespace godwit
