#include "godwit/rl/trajectory.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

namespace godwit::rl {

using nlohmann::json;

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Segment, begin, end, version, state)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TurnRecord, begin, end, state, reward, calls, faults, wrong, redundant,
                                   checked, valid, malformed)

int64_t Trajectory::drawn() const {
  int64_t tokens = 0;
  for (const Segment& s : segments) tokens += s.end - s.begin;
  return tokens;
}

int64_t Trajectory::oldest_version() const {
  int64_t oldest = std::numeric_limits<int64_t>::max();
  for (const Segment& s : segments) oldest = std::min(oldest, s.version);
  return oldest;
}

int64_t Trajectory::total(int64_t TurnRecord::*part) const {
  int64_t sum = 0;
  for (const TurnRecord& turn : turns) sum += turn.*part;
  return sum;
}

EpisodeOutcome Trajectory::outcome() const {
  // A call that is not as the tool wants it is a step that was not right: else a policy that stops with such
  // calls after its first good ones would have the share of those.
  const int64_t checked = total(&TurnRecord::checked) + total(&TurnRecord::wrong);
  const int64_t valid = total(&TurnRecord::valid);
  return {.success = success,
          .process = checked > 0 ? static_cast<double>(valid) / static_cast<double>(checked) : 0.0,
          .calls = total(&TurnRecord::calls),
          .redundant = total(&TurnRecord::redundant),
          .counted = drawn(),
          .base_tokens = base_tokens};
}

void to_json(json& j, const Trajectory& t) {
  j = {{"task_seed", t.task_seed},
       {"environment", t.environment},
       {"group", t.group},
       {"sample", t.sample},
       {"base_tokens", t.base_tokens},
       {"ids", t.ids},
       {"pictures", t.pictures},
       {"logp", t.logp},
       {"turns", t.turns},
       {"segments", t.segments},
       {"done", t.done},
       {"success", t.success},
       {"reason", t.reason}};
}

void from_json(const json& j, Trajectory& t) {
  j.at("task_seed").get_to(t.task_seed);
  j.at("environment").get_to(t.environment);
  j.at("group").get_to(t.group);
  j.at("sample").get_to(t.sample);
  j.at("base_tokens").get_to(t.base_tokens);
  j.at("ids").get_to(t.ids);
  j.at("pictures").get_to(t.pictures);
  j.at("logp").get_to(t.logp);
  j.at("turns").get_to(t.turns);
  j.at("segments").get_to(t.segments);
  j.at("done").get_to(t.done);
  j.at("success").get_to(t.success);
  j.at("reason").get_to(t.reason);
}

}  // namespace godwit::rl
