// Episodes as text, turn by turn: for people, reports and judges.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "godwit/rl/trajectory.h"
#include "godwit/text/tokenizer.h"

namespace godwit::rl {

// [{"before", "written", "calls", "faults", "reward"}]: what the model was told since its last turn, what it
// wrote.
nlohmann::json turns_as_text(const Tokenizer& tokenizer, const Trajectory& trajectory);

}  // namespace godwit::rl
