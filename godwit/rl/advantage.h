// From what episodes achieved to one advantage for each turn. No LibTorch here. Groups are explicit ids: the
// episodes of one task, in any order and of any number.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace godwit::rl {

// What the environment and the rollout know about a finished episode.
struct EpisodeOutcome {
  double success = 0;       // of the hidden verifier, 0 to 1
  double process = 0;       // share of the intermediate steps that were valid, 0 to 1
  int64_t calls = 0;        // of tools
  int64_t redundant = 0;    // of these, calls that told or changed nothing new
  int64_t counted = 0;      // tokens that count against the budget: all that the model wrote
  int64_t base_tokens = 0;  // b0 of the task; 0 = no budget
};

struct RewardOptions {
  double success = 1;
  double process = 0;
  double efficiency = 0;  // taken off a solved task: efficiency * redundant / calls
  // Token budget (Kimi K3 report, arXiv:2607.24653 section 4): more than factor * b0 tokens and the reward is
  // -1, whatever else was achieved. The factor falls from `budget_start` to `budget_end`, geometrically, over
  // `budget_steps` steps. 0 = no budget.
  double budget_start = 0, budget_end = 0;
  int64_t budget_steps = 0;
  // Soft over-long penalty (DAPO, arXiv:2503.14476 eq. 13): from 0 at limit - buffer tokens linearly to -1 at
  // the limit. 0 = off.
  int64_t overlong_limit = 0, overlong_buffer = 0;
  bool operator==(const RewardOptions&) const = default;
};

// Infinite where there is no budget.
double budget_factor(const RewardOptions& options, int64_t step);
double episode_reward(const RewardOptions& options, const EpisodeOutcome& outcome, int64_t step);

enum class Baseline {
  kCentred,       // r - mean of the group
  kStandardised,  // (r - mean) / (std + 1e-6), std of the group as a population (GRPO, arXiv:2402.03300)
  kLeaveOneOut,   // r - mean of the others (RLOO, arXiv:2402.14740)
};

// One advantage for each reward; a group of one has 0.
std::vector<double> group_advantages(Baseline baseline, std::span<const double> rewards,
                                     std::span<const int64_t> groups);

// True where all rewards of the group are equal: there is nothing to learn from it.
std::vector<uint8_t> zero_variance(std::span<const double> rewards, std::span<const int64_t> groups);

// G_k = sum over j >= k of discount^(j-k) r_j.
std::vector<double> turn_returns(std::span<const double> rewards, double discount);

enum class Credit {
  kEpisode,     // every turn has its episode's advantage
  kTurns,       // from each turn's own return
  kStepGroups,  // the episode's, plus one among the turns that began in the same environment state
};

struct AdvantageOptions {
  Baseline baseline = Baseline::kCentred;
  Credit credit = Credit::kEpisode;
  double discount = 1;     // of the returns of turns
  double step_weight = 1;  // kStepGroups: weight of the second term
  bool skip_equal = true;  // groups without variance are not trained on
  bool operator==(const AdvantageOptions&) const = default;
};

struct TurnOutcome {
  uint64_t state = 0;  // hash of the environment's state before the turn
  double reward = 0;   // of this turn alone
};

struct EpisodeResult {
  int64_t group = 0;
  double reward = 0;  // of the whole episode; its last turn earns it
  std::vector<TurnOutcome> turns;
};

struct EpisodeAdvantage {
  bool skipped = false;  // its group has no variance
  std::vector<double> turns;
};

// kTurns: returns of the turns' rewards with the episode's reward at the last turn, less the group's mean
// over episodes of the episode's mean return; with discount 1 and no other rewards it equals kEpisode.
// kStepGroups: A = A_episode + step_weight * A_step (GiGPO, arXiv:2505.10978): A_step is the same baseline
// among the returns of all turns of the group that began in equal states; a state seen once has 0.
std::vector<EpisodeAdvantage> turn_advantages(const AdvantageOptions& options,
                                              std::span<const EpisodeResult> episodes);

}  // namespace godwit::rl
