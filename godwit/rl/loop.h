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
#include "godwit/rl/statistics.h"

namespace godwit::rl {

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
