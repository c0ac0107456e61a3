// A training run: every context stage of a recipe, with evaluation, gates, checkpoints and metrics, in one
// call.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "godwit/dist/group.h"
#include "godwit/model/weights.h"
#include "godwit/train/held_out.h"
#include "godwit/train/recipe.h"

namespace godwit {

struct RunOptions {
  at::Device device = at::kCPU;
  bool resume = false;           // go on from the newest checkpoint in recipe.out
  dist::Group* group = nullptr;  // the processes that train together; closed by the run. None: this one alone
  // Called before every step with its number, from 1: a place for experiments to meddle with the weights.
  std::function<void(int64_t step, ModelWeights& weights)> before_step = {};
};

struct StageSummary {
  std::string name;
  int64_t context = 0;
  int64_t steps = 0;
  int64_t tokens = 0;
  double seconds = 0;
  double loss = 0;         // training loss, mean of the stage's last steps
  double gate_before = 0;  // held-out loss at the stage before's context, when the stage began
  double gate_after = 0;   // and when it ended; 0 where the stage has no gate
};

struct RunSummary {
  int64_t parameters = 0;
  int64_t steps = 0;
  int64_t tokens = 0;
  double seconds = 0;
  HeldOutLoss before, after;  // at the first stage's context; tokens = 0 without held-out data
  HeldOutLoss longest;        // after, at the last stage's context
  double first_max_vio = 0,
         last_max_vio = 0;   // largest over the layers, at the first and (mean of) the last steps
  int64_t dead_experts = 0;  // largest over the layers, without a token in the balance window
  std::vector<StageSummary> stages;
  bool finished = false;  // false: stopped by the time limit or a signal, a checkpoint is saved
};

// Runs (or resumes) the recipe. Writes recipe.out: recipe.toml, metrics.jsonl, TensorBoard events,
// checkpoints/step-N/, model/. Throws Error: a bad recipe or data, a run directory in use without `resume`, a
// gate that failed, a loss that is not finite (policy stop).
RunSummary run_training(const Recipe& recipe, const RunOptions& options);

}  // namespace godwit
