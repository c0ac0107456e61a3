#include "godwit/rl/advantage.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "godwit/base/check.h"

namespace godwit::rl {
namespace {

constexpr double kEqual = 1e-9;  // rewards closer than this are one reward: they are sums of a few terms
constexpr double kStdEps = 1e-6;

std::map<int64_t, std::vector<size_t>> members(std::span<const int64_t> groups) {
  std::map<int64_t, std::vector<size_t>> out;
  for (size_t i = 0; i < groups.size(); ++i) out[groups[i]].push_back(i);
  return out;
}

double mean_of(const std::vector<double>& values) {
  double sum = 0;
  for (const double v : values) sum += v;
  return values.empty() ? 0 : sum / static_cast<double>(values.size());
}

double std_of(const std::vector<double>& values, double mean) {
  double sum = 0;
  for (const double v : values) sum += (v - mean) * (v - mean);
  return values.empty() ? 0 : std::sqrt(sum / static_cast<double>(values.size()));
}

bool all_equal(const std::vector<double>& values) {
  if (values.empty()) return true;
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  return *high - *low <= kEqual;
}

// What turns a value into an advantage among `values`.
struct Scale {
  double mean = 0, factor = 0;
  double operator()(double value) const { return (value - mean) * factor; }
};

Scale scale_of(Baseline baseline, const std::vector<double>& values) {
  const auto n = static_cast<double>(values.size());
  Scale scale{.mean = mean_of(values), .factor = 1};
  if (values.size() < 2) return {.mean = scale.mean, .factor = 0};
  if (baseline == Baseline::kStandardised) scale.factor = 1 / (std_of(values, scale.mean) + kStdEps);
  if (baseline == Baseline::kLeaveOneOut) scale.factor = n / (n - 1);  // r - (n mean - r) / (n - 1)
  return scale;
}

std::vector<std::vector<double>> returns_of(const AdvantageOptions& options,
                                            std::span<const EpisodeResult> episodes) {
  std::vector<std::vector<double>> out;
  for (const EpisodeResult& episode : episodes) {
    std::vector<double> rewards;
    for (const TurnOutcome& turn : episode.turns) rewards.push_back(turn.reward);
    if (!rewards.empty()) rewards.back() += episode.reward;
    out.push_back(turn_returns(rewards, options.discount));
  }
  return out;
}

// Adds the advantage of every turn among the turns of its group that began in the same state.
void add_step_groups(const AdvantageOptions& options, std::span<const EpisodeResult> episodes,
                     const std::vector<std::vector<double>>& returns, std::vector<EpisodeAdvantage>& out) {
  std::map<std::pair<int64_t, uint64_t>, std::vector<double>> by_state;
  for (size_t i = 0; i < episodes.size(); ++i)
    for (size_t k = 0; k < episodes[i].turns.size(); ++k)
      by_state[{episodes[i].group, episodes[i].turns[k].state}].push_back(returns[i][k]);
  std::map<std::pair<int64_t, uint64_t>, Scale> scales;
  for (const auto& [state, values] : by_state) scales[state] = scale_of(options.baseline, values);
  for (size_t i = 0; i < episodes.size(); ++i)
    for (size_t k = 0; k < episodes[i].turns.size(); ++k)
      out[i].turns[k] +=
          options.step_weight * scales.at({episodes[i].group, episodes[i].turns[k].state})(returns[i][k]);
}

}  // namespace

double budget_factor(const RewardOptions& options, int64_t step) {
  if (options.budget_start <= 0) return std::numeric_limits<double>::infinity();
  const double end = options.budget_end > 0 ? options.budget_end : options.budget_start;
  const double share =
      options.budget_steps > 0
          ? std::clamp(static_cast<double>(step) / static_cast<double>(options.budget_steps), 0.0, 1.0)
          : 0.0;
  return options.budget_start * std::pow(end / options.budget_start, share);
}

double episode_reward(const RewardOptions& options, const EpisodeOutcome& outcome, int64_t step) {
  if (outcome.base_tokens > 0 &&
      static_cast<double>(outcome.counted) >
          budget_factor(options, step) * static_cast<double>(outcome.base_tokens)) {
    return -1;
  }
  double reward = options.success * outcome.success + options.process * outcome.process;
  if (outcome.success > 0 && outcome.calls > 0) {
    reward -=
        options.efficiency * static_cast<double>(outcome.redundant) / static_cast<double>(outcome.calls);
  }
  if (options.overlong_limit > 0 && outcome.counted > options.overlong_limit - options.overlong_buffer) {
    const auto over =
        static_cast<double>(outcome.counted - (options.overlong_limit - options.overlong_buffer));
    reward -= options.overlong_buffer > 0 ? std::min(1.0, over / static_cast<double>(options.overlong_buffer))
                                          : 1.0;
  }
  return reward;
}

std::vector<double> group_advantages(Baseline baseline, std::span<const double> rewards,
                                     std::span<const int64_t> groups) {
  check(rewards.size() == groups.size(), "advantages: {} rewards and {} group ids", rewards.size(),
        groups.size());
  std::vector<double> out(rewards.size());
  for (const auto& [id, indices] : members(groups)) {
    std::vector<double> values;
    for (const size_t i : indices) values.push_back(rewards[i]);
    const Scale scale = scale_of(baseline, values);
    for (const size_t i : indices) out[i] = scale(rewards[i]);
  }
  return out;
}

std::vector<uint8_t> zero_variance(std::span<const double> rewards, std::span<const int64_t> groups) {
  check(rewards.size() == groups.size(), "advantages: {} rewards and {} group ids", rewards.size(),
        groups.size());
  std::vector<uint8_t> out(rewards.size());
  for (const auto& [id, indices] : members(groups)) {
    std::vector<double> values;
    for (const size_t i : indices) values.push_back(rewards[i]);
    const bool equal = all_equal(values);
    for (const size_t i : indices) out[i] = equal;
  }
  return out;
}

std::vector<double> turn_returns(std::span<const double> rewards, double discount) {
  std::vector<double> out(rewards.size());
  double next = 0;
  for (size_t k = rewards.size(); k-- > 0;) out[k] = next = rewards[k] + discount * next;
  return out;
}

std::vector<EpisodeAdvantage> turn_advantages(const AdvantageOptions& options,
                                              std::span<const EpisodeResult> episodes) {
  std::vector<int64_t> groups;
  std::vector<double> totals;  // what the whole episode earned
  for (const EpisodeResult& episode : episodes) {
    groups.push_back(episode.group);
    double total = episode.reward;
    if (options.credit != Credit::kEpisode)
      for (const TurnOutcome& turn : episode.turns) total += turn.reward;
    totals.push_back(total);
  }
  const std::vector<double> whole = group_advantages(options.baseline, totals, groups);
  const std::vector<uint8_t> equal = zero_variance(totals, groups);
  std::vector<EpisodeAdvantage> out(episodes.size());
  for (size_t i = 0; i < episodes.size(); ++i) {
    out[i].skipped = options.skip_equal && equal[i];
    out[i].turns.assign(episodes[i].turns.size(), whole[i]);
  }
  if (options.credit == Credit::kEpisode) return out;

  const std::vector<std::vector<double>> returns = returns_of(options, episodes);
  if (options.credit == Credit::kStepGroups) {
    add_step_groups(options, episodes, returns, out);
    return out;
  }
  for (const auto& [id, indices] : members(groups)) {
    std::vector<double> means;
    for (const size_t i : indices) means.push_back(mean_of(returns[i]));
    const Scale scale = scale_of(options.baseline, means);
    for (const size_t i : indices)
      for (size_t k = 0; k < returns[i].size(); ++k) out[i].turns[k] = scale(returns[i][k]);
  }
  return out;
}

}  // namespace godwit::rl
