// What finished episodes achieved, and the evaluation of a model on tasks of an environment.
#pragma once

#include <cstdint>
#include <vector>

#include "godwit/rl/rollout.h"

namespace godwit::rl {

// Of finished episodes.
struct EpisodeStats {
  int64_t episodes = 0, solved = 0;         // solved: success of at least a half
  int64_t faulted = 0, recovered = 0;       // met a tool's failure; and were solved all the same
  double reward = 0, success = 0;           // means
  double calls = 0, turns = 0, tokens = 0;  // means a task; tokens: written by the model
  double turn_reward = 0;                   // mean of the sum of the turns' own rewards
  double solved_calls = 0;                  // mean of the calls of the solved ones
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

// `rewards`: one an episode, in order, or none.
EpisodeStats episode_stats(const std::vector<std::vector<Trajectory>>& groups,
                           const std::vector<double>& rewards);

struct PolicyEvaluation {
  int64_t tasks =
      128;  // one episode each, of a stream of tasks of their own: the same ones for the same seed
  double temperature = 1;
  uint64_t seed = 0;
};
// `rollout` says what the tasks are and what an episode may take.
EpisodeStats evaluate_policy(const LoadedModel& model, RolloutOptions rollout,
                             const PolicyEvaluation& evaluation);

}  // namespace godwit::rl
