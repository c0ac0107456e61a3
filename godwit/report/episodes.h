// Episodes of a reinforcement learning run, to be read turn by turn: RUN/trajectories/step-N.json.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace godwit::report {

struct EpisodeTurn {
  std::string before, written;  // what the model read since its last turn; what it wrote
  int64_t calls = 0, faults = 0;
  double reward = 0;
};

struct Episode {
  int64_t step = 0, group = 0, sample = 0;
  double reward = 0, success = 0;
  std::string reason;
  std::vector<EpisodeTurn> turns;
};

// Those of the first and of the last step that kept any. Throws Error that names the file.
std::vector<Episode> read_episodes(const std::filesystem::path& run);

std::string episodes_html(const std::vector<Episode>& episodes);

}  // namespace godwit::report
