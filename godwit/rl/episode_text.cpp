#include "godwit/rl/episode_text.h"

#include <nlohmann/json.hpp>
#include <span>

namespace godwit::rl {

nlohmann::json turns_as_text(const Tokenizer& tokenizer, const Trajectory& t) {
  nlohmann::json turns = nlohmann::json::array();
  int64_t at = 0;
  const auto part = [&](int64_t from, int64_t to) {
    return tokenizer.decode(
        std::span(t.ids).subspan(static_cast<size_t>(from), static_cast<size_t>(to - from)));
  };
  for (const TurnRecord& turn : t.turns) {
    turns.push_back({{"before", part(at, turn.begin)},
                     {"written", part(turn.begin, turn.end)},
                     {"calls", turn.calls},
                     {"faults", turn.faults},
                     {"reward", turn.reward}});
    at = turn.end;
  }
  return turns;
}

}  // namespace godwit::rl
