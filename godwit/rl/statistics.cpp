#include "godwit/rl/statistics.h"

#include <cmath>

namespace godwit::rl {
namespace {

constexpr uint64_t kEvalStream = 0x6576616c;  // "eval"

}  // namespace

Interval share_interval(int64_t successes, int64_t of) {
  if (of <= 0) return {};
  constexpr double kZ = 1.959963984540054;
  const auto n = static_cast<double>(of);
  const double p = static_cast<double>(successes) / n;
  const double centre = p + kZ * kZ / (2 * n);
  const double half = kZ * std::sqrt(p * (1 - p) / n + kZ * kZ / (4 * n * n));
  const double scale = 1 + kZ * kZ / n;
  return {.low = (centre - half) / scale, .high = (centre + half) / scale};
}

EpisodeStats episode_stats(const std::vector<std::vector<Trajectory>>& groups,
                           const std::vector<double>& rewards) {
  EpisodeStats s;
  for (const auto& group : groups) {
    for (const Trajectory& t : group) {
      const bool solved = t.success >= 0.5, faulted = t.total(&TurnRecord::faults) > 0;
      if (!rewards.empty()) s.reward += rewards[static_cast<size_t>(s.episodes)];
      ++s.episodes;
      s.solved += solved;
      s.faulted += faulted;
      s.recovered += solved && faulted;
      s.success += t.success;
      s.calls += static_cast<double>(t.total(&TurnRecord::calls));
      if (solved) s.solved_calls += static_cast<double>(t.total(&TurnRecord::calls));
      for (const TurnRecord& turn : t.turns) s.turn_reward += turn.reward;
      s.turns += static_cast<double>(t.turns.size());
      s.tokens += static_cast<double>(t.drawn());
      s.redundant += static_cast<double>(t.total(&TurnRecord::redundant));
      s.wrong += static_cast<double>(t.total(&TurnRecord::wrong));
      s.malformed += static_cast<double>(t.total(&TurnRecord::malformed));
      s.truncated += t.reason == "length" ? 1 : 0;
    }
  }
  if (s.solved > 0) s.solved_calls /= static_cast<double>(s.solved);
  if (s.episodes > 0) {
    for (double* mean : {&s.reward, &s.success, &s.calls, &s.turns, &s.tokens, &s.turn_reward, &s.redundant,
                         &s.wrong, &s.malformed, &s.truncated}) {
      *mean /= static_cast<double>(s.episodes);
    }
  }
  return s;
}

EpisodeStats evaluate_policy(const LoadedModel& model, RolloutOptions rollout,
                             const PolicyEvaluation& evaluation) {
  rollout.seed = evaluation.seed ^ (kEvalStream << 32);
  rollout.groups = evaluation.tasks;
  rollout.samples = 1;
  rollout.finish_share = 1;
  rollout.max_staleness = 0;
  rollout.temperature = evaluation.temperature;
  return episode_stats(Rollouts(model, rollout).run(/*version=*/0), {});
}

}  // namespace godwit::rl
