// The environments that come with Godwit. `make_environment` knows them by these names.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>

#include "godwit/rl/environment.h"

namespace godwit::rl {

// "calculator": a chain of operations, a tool for one of them that sometimes fails. Options: steps (2),
// largest (20), failure (0.25), give_up (0): share of demonstrations that answer after an error instead of
// calling again; twice (0): share of their successful calls that are made once more.
std::unique_ptr<Environment> make_calculator(const nlohmann::json& options);

// "notes": facts are told turn by turn, and asked for later. Options: facts (2), gap (4): idle turns between,
// keep (0.5): share of demonstrations that write notes.
std::unique_ptr<Environment> make_notes(const nlohmann::json& options);

// "grid": a way to a goal behind a locked door. Options: width (5), height (5), turns (24), wander (0): share
// of a demonstration's moves that are random.
std::unique_ptr<Environment> make_grid(const nlohmann::json& options);

// "sql": questions about a table. Options: people (8), turns (8), failure (0), give_up (0).
std::unique_ptr<Environment> make_sql(const nlohmann::json& options);

// "log_search": one line of a long log. Options: lines (200), failures (4), turns (12), search (true): with a
// tool that finds; without it the log must be read, whatever its length.
std::unique_ptr<Environment> make_log_search(const nlohmann::json& options);

// "files": a script with a mistake and hidden tests in a sandbox. Options: submissions (2), turns (12), guess
// (0): share of demonstrations with a wrong repair, weaker (false).
std::unique_ptr<Environment> make_files(const nlohmann::json& options);

// "reading": a number in a picture, for models with a vision tower. Options: digits (2), attempts (1), noise
// (0.2), slip (0): share of demonstrations whose first answer is another number.
std::unique_ptr<Environment> make_reading(const nlohmann::json& options);

// "process": any program that speaks JSON lines, in a sandbox (docs/rl.md). Options: command (list of words),
// folder (seen as /program), options (passed on), answer_s (10), turns (64), weaker (false), cpu_s,
// memory_mb, work_mb, processes, line_mb.
std::unique_ptr<Environment> make_process(const nlohmann::json& options);

}  // namespace godwit::rl
