// Checkpoints of a run: RUN/checkpoints/step-N/ (io/snapshot.h) with state.safetensors (weights, optimiser,
// balance) and checkpoint.json (where the run stands).
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "godwit/train/state.h"

namespace godwit {

struct Checkpoint {
  int64_t step = 0;
  nlohmann::json meta;
  StateMap tensors;
};

// Saves, then keeps the `keep` newest (0: all); an older one goes only after the new one was read back and
// verified. Throws Error and leaves older checkpoints alone when the disk is full or a write fails.
void save_checkpoint(const std::filesystem::path& root, const Checkpoint& checkpoint, int64_t keep);

// The newest checkpoint that verifies; damaged ones are named in a warning and passed over. Error if all are
// damaged; nullopt if there is none.
std::optional<Checkpoint> load_newest_checkpoint(const std::filesystem::path& root);

}  // namespace godwit
