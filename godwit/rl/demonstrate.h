// Demonstrations for supervised fine-tuning: an environment's scripted expert plays whole episodes.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "godwit/rl/environment.h"

namespace godwit::rl {

struct Demonstration {
  std::vector<ChatMessage> messages;
  std::string tools;  // a JSON list, or empty
  double success = 0;
  int64_t calls = 0, faults = 0;
};

// Throws Error when the environment has no expert, or its expert does not come to an end.
Demonstration demonstrate(Environment& environment, uint64_t seed);

// As `data pack` reads it: {"messages": [...], "tools": [...], "thinking": false}.
nlohmann::ordered_json to_json(const Demonstration& demonstration);

}  // namespace godwit::rl
