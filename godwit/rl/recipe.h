// A recipe of reinforcement learning: the whole run in one file. docs/rl.md lists every key.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "godwit/rl/advantage.h"
#include "godwit/rl/judge.h"
#include "godwit/rl/objective.h"
#include "godwit/rl/rollout.h"
#include "godwit/train/recipe.h"

namespace godwit::rl {

struct RlEvalOptions {
  int64_t every = 0;    // steps; 0 = only before the first and after the last
  int64_t tasks = 128;  // tasks that no step sees, one episode each; 0 = no evaluation
  double temperature = 1;
  bool operator==(const RlEvalOptions&) const = default;
};

// Where an environment has a teacher (distill.h).
struct DistillOptions {
  double weight = 1;  // of the teacher's advantages beside the reward's
  double limit = 5;   // nats; of each token's
  bool operator==(const DistillOptions&) const = default;
};

struct RlTrainOptions {
  bool deterministic = true;
  double max_mean_dlogp = 0.05;
  int64_t micro_batch_tokens = 0;
  Recompute recompute = Recompute::kNone;
  int64_t segment_tokens = 0;  // longer trajectories are trained in segments; 0 = never
  bool mxfp4_experts = false;  // quantisation-aware: the experts' weights are what MXFP4 can say
  TrainDtype dtype = TrainDtype::kF32;
  double minutes = 0;        // the schedule ends at the latest after so long; 0 = off
  double time_limit_s = 0;   // checkpoint and stop after this long; never changes the schedule; 0 = off
  int64_t trajectories = 1;  // groups a step whose episodes are kept as text
  bool tensorboard = true;
  bool operator==(const RlTrainOptions&) const = default;
};

struct RlRecipe {
  std::string out, init;
  int64_t seed = 0, steps = 0;
  RolloutOptions rollout;  // its seed is the recipe's
  RewardOptions reward;
  AdvantageOptions advantage;
  ObjectiveOptions objective;
  DistillOptions distill;
  JudgeOptions judge;
  OptimizerOptions optimizer;
  ScheduleOptions schedule;
  RlEvalOptions eval;
  CheckpointOptions checkpoint;
  RlTrainOptions train;
  bool operator==(const RlRecipe&) const = default;
};

void visit(Fields& f, RlRecipe& recipe);

// Throws Error naming file, line and key.
RlRecipe load_rl_recipe(const std::string& path, const std::vector<std::string>& overrides = {});
RlRecipe parse_rl_recipe(std::string_view text, const std::string& name,
                         const std::vector<std::string>& overrides = {});
std::string to_toml(const RlRecipe& recipe);

}  // namespace godwit::rl
