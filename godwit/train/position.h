// Where a run stands: what a checkpoint says beside the tensors.
#pragma once

#include <cstdint>
#include <deque>
#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "godwit/train/held_out.h"

namespace godwit {

struct RunPosition {
  size_t stage = 0;
  int64_t stage_step = 0;  // steps made in the stage; a stage whose steps are all made has its gate before it
  int64_t steps = 0, tokens = 0;
  double elapsed_s = 0;
  double gate_reference = 0;         // held-out loss at the earlier context when the stage began
  std::vector<int64_t> passed_over;  // by stage: batches left out after returns to a checkpoint
  std::deque<double> recent_losses, recent_max_vio;
  double first_max_vio = 0;
  HeldOutLoss before;  // without its positions
};

void to_json(nlohmann::json& json, const RunPosition& position);
void from_json(const nlohmann::json& json, RunPosition& position);

}  // namespace godwit
