// What the rollouts' own files share: an episode under way, and its group.
#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "godwit/rl/rollout.h"

namespace godwit::rl {

struct Rollouts::Episode {
  Trajectory trajectory;
  std::unique_ptr<Environment> environment;  // none after the end
  int64_t turn_begin = 0;
  uint64_t draw_seed = 0;
  int64_t request = 0;  // of the engine; 0: not there
  // In which it was given to the engine, of those that were.
  int64_t order = std::numeric_limits<int64_t>::max();
  bool turn_over = false;
  // What it had read when it was suspended, and the oldest weights that have read of it. `reading`: the
  // latter for what the engine has of it now.
  std::shared_ptr<const SwappedState> state;
  int64_t state_version = 0, reading = 0;
};

struct Rollouts::Group {
  int64_t id = 0;
  uint64_t draw_seed = 0;
  bool fresh = true;  // no episode has drawn anything: one prompt for all
  std::vector<std::unique_ptr<Episode>> episodes;

  [[nodiscard]] bool complete() const {
    return std::all_of(episodes.begin(), episodes.end(), [](const auto& e) { return e->trajectory.done; });
  }
  [[nodiscard]] int64_t oldest_version() const {
    int64_t oldest = std::numeric_limits<int64_t>::max();
    for (const auto& e : episodes) oldest = std::min(oldest, e->trajectory.oldest_version());
    return oldest;
  }
};

// Of a picture as an environment gives it.
std::string picture_bytes(const std::string& url, const std::string& where);

}  // namespace godwit::rl
