// Checkpoints of a run: RUN/checkpoints/step-N/ with state.safetensors (weights, optimiser, balance) and
// checkpoint.json (where the run stands, and the checksum of the state). Written beside, synced, renamed; an
// older one is removed only after a newer one was read back.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "godwit/train/state.h"

namespace godwit {

struct Checkpoint {
  int64_t step = 0;
  nlohmann::json meta;
  StateMap tensors;
};

// Saves, verifies what was written, then keeps the `keep` newest (0: all). Throws Error and leaves older
// checkpoints alone when the disk is full or a write fails.
void save_checkpoint(const std::filesystem::path& directory, const Checkpoint& checkpoint, int64_t keep);

// The newest checkpoint that verifies; damaged ones are named in a warning and passed over. None: nullopt.
std::optional<Checkpoint> load_newest_checkpoint(const std::filesystem::path& directory);

// "step-120" -> 120; anything else is none.
std::optional<int64_t> checkpoint_step(const std::string& name);

}  // namespace godwit
