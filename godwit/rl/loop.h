// A run of reinforcement learning: rollouts, rewards, advantages, one policy update a step; evaluation on
// tasks that no step sees; checkpoints with the suspended episodes and their environments, from which
// --resume goes on bit for bit.
//
// The run directory: recipe.toml (resolved), metrics.jsonl (one object a step, docs/rl.md),
// trajectories/step-N.json (episodes as text), checkpoints/step-N/, model/.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "godwit/rl/recipe.h"

namespace godwit::rl {

// Of finished episodes.
struct EpisodeStats {
  int64_t episodes = 0, solved = 0;         // solved: success of at least a half
  int64_t faulted = 0, recovered = 0;       // met a tool's failure; and were solved all the same
  double reward = 0, success = 0;           // means
  double calls = 0, turns = 0, tokens = 0;  // means a task; tokens: written by the model
  double redundant = 0, wrong = 0, malformed = 0, truncated = 0;  // means a task

  double recovery() const {
    return faulted > 0 ? static_cast<double>(recovered) / static_cast<double>(faulted) : 0;
  }
};
// The 95 % interval of a share, by Wilson's score.
struct Interval {
  double low = 0, high = 1;
};
Interval share_interval(int64_t successes, int64_t of);

struct RlSummary {
  int64_t steps = 0;
  double seconds = 0;
  EpisodeStats before, after;  // evaluations; episodes = 0 without
  double max_dlogp = 0;        // over all steps of this call
  bool finished = false;
};

struct RlRunOptions {
  at::Device device = at::kCPU;
  bool resume = false;
};

RlSummary run_rl(const RlRecipe& recipe, const RlRunOptions& options);

}  // namespace godwit::rl
