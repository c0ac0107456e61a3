#include "godwit/rl/loop.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "godwit/base/check.h"
#include "godwit/base/log.h"
#include "godwit/base/progress.h"
#include "godwit/base/stop_signals.h"
#include "godwit/io/file.h"
#include "godwit/io/image_processor.h"
#include "godwit/model/checkpoint.h"
#include "godwit/rl/distill.h"
#include "godwit/rl/episode_text.h"
#include "godwit/rl/judge.h"
#include "godwit/rl/policy_step.h"
#include "godwit/train/checkpoint.h"
#include "godwit/train/metrics.h"
#include "godwit/train/schedule.h"

namespace godwit::rl {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using nlohmann::json;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

using Groups = std::vector<std::vector<Trajectory>>;

constexpr std::string_view kStates = "suspended.";  // of tensors in a checkpoint: what episodes have read

// Keys that a resumed run may change: places, how often to save and to measure, limits of this call.
bool is_honoured(std::string_view key) {
  return key == "out" || key == "train.time_limit_s" || key == "train.trajectories" ||
         key == "train.tensorboard" || key.starts_with("checkpoint.") || key.starts_with("eval.");
}

std::map<std::string, std::string> flat(RlRecipe recipe) {
  const auto pairs = flatten_fields([&](Fields& f) { visit(f, recipe); });
  return {pairs.begin(), pairs.end()};
}

class Run {
 public:
  Run(const RlRecipe& recipe, const RlRunOptions& options)
      : recipe_(recipe),
        resume_(options.resume),
        out_(recipe.out),
        model_(load_model(recipe.init, options.device,
                          recipe.train.dtype == TrainDtype::kBf16 ? at::kBFloat16 : at::kFloat)),
        teachers_(recipe, model_),
        rollouts_(model_, recipe.rollout),
        step_(model_, {.objective = recipe.objective,
                       .optimizer = recipe.optimizer,
                       .temperature = recipe.rollout.temperature,
                       .deterministic = recipe.train.deterministic,
                       .max_mean_dlogp = recipe.train.max_mean_dlogp,
                       .micro_batch_tokens = recipe.train.micro_batch_tokens,
                       .recompute = recipe.train.recompute == Recompute::kBlock,
                       .segment_tokens = recipe.train.segment_tokens,
                       .mxfp4_experts = recipe.train.mxfp4_experts}),
        metrics_({.directory = out_, .tensorboard = recipe.train.tensorboard}) {
    if (!recipe.judge.command.empty()) judge_.emplace(recipe.judge);
  }

  RlSummary run() {
    prepare_directory();
    std::string names;
    for (const EnvironmentChoice& c : recipe_.rollout.environments)
      names += (names.empty() ? "" : ", ") + c.name;
    log_info("{}: {}, {} steps of {} x {} episodes", recipe_.out, names, recipe_.steps,
             recipe_.rollout.groups, recipe_.rollout.samples);
    if (steps_ == 0 && recipe_.eval.tasks > 0) {
      before_ = evaluate();
      log_info("before: {}", text_of(before_));
      warn_of_cuts(before_);
    }
    bar_.emplace(ProgressOptions{.label = "rl", .total = recipe_.steps, .done = steps_});
    bool stopped = false;
    while (progress() < 1 && !stopped) {
      if (!one_step()) {  // paused in the middle of a phase
        stopped = true;
        save();
        break;
      }
      const bool ended = progress() >= 1;
      if (recipe_.eval.tasks > 0 && (ended || (recipe_.eval.every > 0 && steps_ % recipe_.eval.every == 0)))
        add_evaluation(ended);
      metrics_.write(row_);
      stopped = !ended && (StopSignals::asked() || (recipe_.train.time_limit_s > 0 &&
                                                    seconds_since(start_) > recipe_.train.time_limit_s));
      const bool due = recipe_.checkpoint.every > 0 && steps_ % recipe_.checkpoint.every == 0;
      if (ended || stopped || due) save();
    }
    bar_->finish();
    save_model();
    metrics_.flush();
    summary_.steps = steps_;
    summary_.before = before_;
    summary_.finished = !stopped;
    summary_.seconds = elapsed();
    return summary_;
  }

 private:
  double elapsed() const { return elapsed_before_ + seconds_since(start_); }
  double progress() const {
    const double by_steps = static_cast<double>(steps_) / static_cast<double>(recipe_.steps);
    const double by_time = recipe_.train.minutes > 0 ? elapsed() / (60 * recipe_.train.minutes) : 0;
    return std::max(by_steps, by_time);
  }

  static std::string text_of(const EpisodeStats& s) {
    return fmt::format("success {:.3f}, recovery {:.3f} ({} of {}), {:.2f} calls, {:.1f} tokens a task",
                       s.success, s.recovery(), s.recovered, s.faulted, s.calls, s.tokens);
  }

  // Such a run learns nothing and does not say so otherwise.
  static void warn_of_cuts(const EpisodeStats& s) {
    if (s.truncated <= 0.5) return;
    log_warn(
        "{:.0f} % of the episodes were cut off: rollout.turn_tokens or rollout.context is too small for what "
        "they need",
        100 * s.truncated);
  }

  void prepare_directory() {
    const bool used = fs::exists(out_ / "metrics.jsonl") || fs::exists(out_ / "checkpoints");
    check(resume_ || !used, "{} holds a run already: --resume goes on with it, another `out` starts anew",
          out_.string());
    if (resume_ && load_checkpoint()) {
      log_info("resuming at step {}", steps_);
    } else if (resume_) {
      log_info("no checkpoint in {}: starting from the beginning", out_.string());
      metrics_.truncate_after(0);
    }
    io::make_directories(out_);
    io::make_directories(out_ / "trajectories");
    io::write_file_atomic(out_ / "recipe.toml", to_toml(recipe_));
  }

  StateMap state() {
    StateMap all;
    for_each_param(model_.config, model_.weights, [&](const ParamInfo& info, at::Tensor& value) {
      all.emplace("weights." + info.name, value.detach());
    });
    for (const auto& [name, tensor] :
         collect_state([&](const StateVisitor& visit) { step_.for_each_state(visit); })) {
      all.emplace("optimizer." + name, tensor);
    }
    return all;
  }

  void check_same_recipe(const RlRecipe& saved) const {
    const auto before = flat(saved), now = flat(recipe_);
    std::string refused;
    for (const auto& [key, value] : now) {
      const auto found = before.find(key);
      const std::string old = found == before.end() ? "(none)" : found->second;
      if (old == value || is_honoured(key)) continue;
      refused += (refused.empty() ? "" : "; ") + key + ": " + old + " -> " + value;
    }
    check(refused.empty(),
          "{}: --resume cannot change what the steps so far were made with: {}. Start a new run from the "
          "weights with "
          "init = \"{}\"",
          out_.string(), refused, (out_ / "model").string());
  }

  bool load_checkpoint() {
    auto found = load_newest_checkpoint(out_ / "checkpoints");
    if (!found) return false;
    check_same_recipe(
        parse_rl_recipe(found->meta.at("recipe").get<std::string>(), "the checkpoint's recipe"));
    Rollouts::Saved suspended{.episodes = found->meta.at("rollouts").get<std::string>(), .states = {}};
    for (const auto& [name, tensor] : found->tensors)
      if (name.starts_with(kStates)) suspended.states.emplace(name.substr(kStates.size()), tensor);
    std::erase_if(found->tensors, [](const auto& entry) { return entry.first.starts_with(kStates); });
    load_state_strict(
        "checkpoint",
        [&](const StateVisitor& visit) {
          for (auto& [name, tensor] : state()) visit(name, tensor);
        },
        found->tensors);
    rollouts_.load(suspended);
    steps_ = found->step;
    tokens_ = found->meta.at("tokens");
    elapsed_before_ = found->meta.at("elapsed_s").get<double>() - seconds_since(start_);
    const json& b = found->meta.at("before");
    before_ = {.episodes = b.at("episodes"),
               .solved = b.at("solved"),
               .faulted = b.at("faulted"),
               .recovered = b.at("recovered"),
               .success = b.at("success"),
               .calls = b.at("calls"),
               .tokens = b.at("tokens")};
    metrics_.truncate_after(steps_);
    return true;
  }

  void save() {
    metrics_.flush();
    const json before = {{"episodes", before_.episodes}, {"solved", before_.solved},
                         {"faulted", before_.faulted},   {"recovered", before_.recovered},
                         {"success", before_.success},   {"calls", before_.calls},
                         {"tokens", before_.tokens}};
    const Rollouts::Saved suspended = rollouts_.save();
    Checkpoint c{.step = steps_,
                 .meta = {{"recipe", to_toml(recipe_)},
                          {"rollouts", suspended.episodes},
                          {"tokens", tokens_},
                          {"elapsed_s", elapsed()},
                          {"before", before}},
                 .tensors = state()};
    for (const auto& [name, tensor] : suspended.states)
      c.tensors.emplace(std::string(kStates) + name, tensor);
    save_checkpoint(out_ / "checkpoints", c, recipe_.checkpoint.keep);
  }

  void save_model() {
    io::AtomicDirectory directory(out_ / "model", io::AtomicDirectory::Existing::kReplace);
    save_weights(model_.config, model_.weights, directory.temporary().string());
    model_.tokenizer.save(directory.temporary().string());
    if (model_.config.vision) io::save_image_processor(model_.images, directory.temporary());
    directory.commit();
  }

  EpisodeStats evaluate() const {
    return evaluate_policy(model_, recipe_.rollout,
                           {.tasks = recipe_.eval.tasks,
                            .temperature = recipe_.eval.temperature,
                            .seed = static_cast<uint64_t>(recipe_.seed)});
  }

  void add_evaluation(bool last) {
    const EpisodeStats s = evaluate();
    const Interval i = share_interval(s.solved, s.episodes);
    row_["eval_success"] = s.success;
    row_["eval_success_low"] = i.low;
    row_["eval_success_high"] = i.high;
    if (s.faulted > 0) row_["eval_recovery"] = s.recovery();
    row_["eval_faulted"] = s.faulted;
    row_["eval_turn_reward"] = s.turn_reward;
    row_["eval_calls"] = s.calls;
    row_["eval_solved_calls"] = s.solved_calls;
    row_["eval_redundant"] = s.redundant;
    row_["eval_tokens"] = s.tokens;
    if (last) summary_.after = s;
  }

  // By the engine's own calls, for which a phase has to be whole.
  bool repeats() const { return recipe_.train.deterministic && !model_.device.is_cpu(); }
  // Which episodes of a partial phase are the first to finish depends on what the engine does beside them: a
  // pause would change it.
  bool may_pause() const { return !repeats() && recipe_.rollout.finish_share >= 1; }

  // False where the phase was paused: nothing has been trained.
  bool one_step() {
    const auto begin = Clock::now();
    Groups groups = rollouts_.run(steps_, [&](const RolloutProgress& p) {
      bar_->update(steps_, fmt::format("{}  rollout {}/{} episodes, {} tokens", last_text_, p.finished,
                                       p.finished + p.active, p.drawn));
      return !may_pause() || !StopSignals::asked();
    });
    if (rollouts_.paused()) return false;
    const double rollout_s = seconds_since(begin);
    std::vector<double> rewards;
    std::vector<EpisodeResult> results;
    for (const auto& group : groups) {
      std::vector<double> scores(group.size(), 0.0);
      if (judge_) scores = judge_->score(group, model_.tokenizer);
      for (size_t k = 0; k < group.size(); ++k) {
        const Trajectory& t = group[k];
        rewards.push_back(episode_reward(recipe_.reward, t.outcome(), steps_) +
                          recipe_.judge.weight * scores[k]);
        EpisodeResult r{.group = t.group, .reward = rewards.back(), .turns = {}};
        for (const TurnRecord& turn : t.turns)
          r.turns.push_back({.state = turn.state, .reward = turn.reward});
        results.push_back(std::move(r));
      }
    }
    const std::vector<EpisodeAdvantage> advantages = turn_advantages(recipe_.advantage, results);
    std::vector<const Trajectory*> all;
    for (const auto& group : groups)
      for (const Trajectory& t : group) all.push_back(&t);
    const Teachers::Judgement judged = teachers_.judge(all);
    std::vector<PolicySample> samples;
    int64_t skipped = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      skipped += advantages[i].skipped && all[i]->sample == 0;
      // A teacher has something to say about a group without variance too.
      if (advantages[i].skipped && !teachers_.has(*all[i])) continue;
      samples.push_back({.trajectory = all[i],
                         .advantages = advantages[i].turns,
                         .token_advantages = judged.advantages[i]});
    }
    std::vector<PolicySample> later;  // their turn comes when the present weights are gone
    for (const Trajectory* t : rollouts_.waiting())
      later.push_back({.trajectory = t, .advantages = {}, .token_advantages = {}});
    if (repeats()) {
      const Rollouts::Repeated repeated = rollouts_.repeat();
      add_repeated(repeated, samples);
      add_repeated(repeated, later);
    }
    const double lr = lr_multiplier(recipe_.schedule, progress() + 1.0 / static_cast<double>(recipe_.steps));
    const auto train_begin = Clock::now();
    const PolicyStepResult waiting = step_.verify(later, steps_);
    PolicyStepResult result = step_.run(samples, steps_, lr);
    result.add_compared(waiting);
    const int64_t version = steps_++;
    make_row(groups, rewards, result, version);
    row_["groups"] = groups.size();
    row_["skipped_groups"] = skipped;
    if (judged.tokens > 0) row_["teacher_kl"] = judged.kl;
    row_["lr"] = lr * recipe_.optimizer.muon_lr;
    row_["rollout_s"] = rollout_s;
    row_["train_s"] = seconds_since(train_begin);
    row_["suspended"] = rollouts_.suspended();
    summary_.max_dlogp = std::max(summary_.max_dlogp, result.max_dlogp);
    keep_trajectories(groups, rewards);
    return true;
  }

  // Where the bits of a row depend on its batch: the trainer's log-probabilities by the rollout's own calls.
  void add_repeated(const Rollouts::Repeated& all, std::vector<PolicySample>& samples) const {
    for (PolicySample& sample : samples) {
      const Trajectory& t = *sample.trajectory;
      sample.repeated.assign(t.ids.size(), std::numeric_limits<double>::quiet_NaN());
      const auto found = all.find({t.group, t.sample});
      if (found == all.end()) continue;
      for (const Rollouts::Token& token : found->second) sample.repeated.at(token.at) = token.logp;
      // On a state of older weights they are not what the present policy says.
      for (const Segment& s : t.segments)
        if (!s.is_of(steps_))
          std::fill(sample.repeated.begin() + s.begin, sample.repeated.begin() + s.end,
                    std::numeric_limits<double>::quiet_NaN());
    }
  }

  void make_row(const Groups& groups, const std::vector<double>& rewards, const PolicyStepResult& result,
                int64_t version) {
    const EpisodeStats s = episode_stats(groups, rewards);
    if (steps_ == 1) warn_of_cuts(s);
    double staleness = 0, drawn = 0;
    int64_t oldest = 0;
    std::map<std::string, int64_t> reasons;
    for (const auto& group : groups) {
      for (const Trajectory& t : group) {
        ++reasons[t.reason];
        tokens_ += static_cast<int64_t>(t.ids.size());
        for (const Segment& segment : t.segments) {
          const auto tokens = static_cast<double>(segment.end - segment.begin);
          staleness += tokens * static_cast<double>(version - segment.version);
          drawn += tokens;
          oldest = std::max(oldest, version - segment.version);
        }
      }
    }
    const PolicyStats& p = result.stats;
    row_ = {{"step", steps_},
            {"reward", s.reward},
            {"success", s.success},
            {"recovery", s.faulted > 0 ? json(s.recovery()) : json()},
            {"faulted", s.faulted},
            {"calls", s.calls},
            {"solved_calls", s.solved_calls},
            {"tokens", s.tokens},
            {"turns", s.turns},
            {"turn_reward", s.turn_reward},
            {"redundant", s.redundant},
            {"wrong", s.wrong},
            {"malformed", s.malformed},
            {"truncated", s.truncated},
            {"staleness", drawn > 0 ? staleness / drawn : 0.0},
            {"max_staleness", oldest},
            {"max_dlogp", result.max_dlogp},
            {"mean_dlogp", result.mean_dlogp},
            {"compared_tokens", result.present_tokens},
            {"mean_drift", result.mean_drift},
            {"policy_delta", p.mean(p.abs_delta)},
            {"kl", p.mean(p.k3)},
            {"over_ln2", p.mean(p.over_ln2)},
            {"effective_share", p.effective_share()},
            {"masked_share", p.mean(p.cut)},
            {"entropy", p.mean(p.entropy)},
            {"loss", result.loss},
            {"grad_norm", result.grad_norm},
            {"episodes", s.episodes},
            {"total_tokens", tokens_},
            {"reasons", reasons}};
    const double factor = budget_factor(recipe_.reward, version);
    if (std::isfinite(factor)) row_["budget_factor"] = factor;
    last_text_ = fmt::format(
        "reward {:.3f} success {:.2f} recovery {:.2f} calls {:.1f} tokens {:.0f} "
        "stale {:.1f} entropy {:.2f} masked {:.2f} max|d| {:.1e}",
        s.reward, s.success, s.recovery(), s.calls, s.tokens, row_["staleness"].get<double>(),
        p.mean(p.entropy), p.mean(p.cut), result.max_dlogp);
    bar_->update(steps_, last_text_);
  }

  // Some episodes to read.
  void keep_trajectories(const Groups& groups, const std::vector<double>& rewards) {
    json kept = json::array();
    size_t i = 0;
    for (const auto& group : groups) {
      for (const Trajectory& t : group) {
        const double reward = rewards[i++];
        if (static_cast<int64_t>(&group - groups.data()) >= recipe_.train.trajectories) continue;
        kept.push_back({{"group", t.group},
                        {"sample", t.sample},
                        {"reward", reward},
                        {"success", t.success},
                        {"reason", t.reason},
                        {"turns", turns_as_text(model_.tokenizer, t)}});
      }
    }
    if (kept.empty()) return;
    io::write_file_atomic(out_ / "trajectories" / fmt::format("step-{}.json", steps_),
                          kept.dump(1, ' ', false, json::error_handler_t::replace));
  }

  const RlRecipe& recipe_;
  bool resume_;
  fs::path out_;
  LoadedModel model_;
  Teachers teachers_;
  std::optional<Judge> judge_;
  Rollouts rollouts_;
  PolicyStep step_;
  MetricsWriter metrics_;
  RlSummary summary_;
  EpisodeStats before_;
  Clock::time_point start_ = Clock::now();
  double elapsed_before_ = 0;
  int64_t steps_ = 0, tokens_ = 0;  // tokens: of all trajectories trained on
  json row_;
  std::string last_text_;
  std::optional<ProgressBar> bar_;
};

}  // namespace

RlSummary run_rl(const RlRecipe& recipe, const RlRunOptions& options) {
  const StopSignals signals;
  return Run(recipe, options).run();
}

}  // namespace godwit::rl
