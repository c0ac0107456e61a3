// The environments that come with Godwit. `make_environment` knows them by these names.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>

#include "godwit/rl/environment.h"

namespace godwit::rl {

// "calculator": a chain of operations, a tool for one of them that sometimes fails. Options: steps (2),
// largest (20), failure (0.25), give_up (0): share of demonstrations that answer after an error instead of
// calling again.
std::unique_ptr<Environment> make_calculator(const nlohmann::json& options);

// "notes": facts are told turn by turn, and asked for later. Options: facts (2), gap (4): idle turns between,
// keep (0.5): share of demonstrations that write notes.
std::unique_ptr<Environment> make_notes(const nlohmann::json& options);

// "grid": a way to a goal behind a locked door. Options: width (5), height (5), turns (24), wander (0): share
// of a demonstration's moves that are random.
std::unique_ptr<Environment> make_grid(const nlohmann::json& options);

}  // namespace godwit::rl
