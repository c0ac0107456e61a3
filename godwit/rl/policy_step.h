// One update of the policy from finished trajectories: their log-probabilities under the present weights, the
// objective, its gradient, the optimiser.
//
// One numerics. In deterministic mode log pi_theta of each token is the replayed one (replay.h), and the
// gradient is that of the chunked forward, which is the same function rounded in another order:
//   logp = chunk + sg[replay - chunk].
// Tokens that these very weights drew must then have exactly the log-probability that the rollout recorded; a
// difference is an error. Otherwise logp is the chunked forward's, the difference is measured, and a bound on
// it stops the run.
//
// The router's balance bias is frozen: reinforcement learning does not move it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "godwit/infer/model.h"
#include "godwit/rl/objective.h"
#include "godwit/rl/trajectory.h"
#include "godwit/train/optimizer.h"

namespace godwit::rl {

struct PolicyStepOptions {
  ObjectiveOptions objective;
  OptimizerOptions optimizer;
  double temperature = 1;
  bool deterministic = true;
  double max_mean_dlogp = 0.05;  // not deterministic: bound on the mean |d| of tokens of the present version
  int64_t micro_batch_tokens = 0;  // of one forward and backward, whole trajectories; 0 = all at once
  bool recompute = false;
};

struct PolicySample {
  const Trajectory* trajectory = nullptr;
  std::vector<double> advantages;             // one a turn
  std::vector<double> token_advantages = {};  // empty, or one for each id: added to its turn's
};

struct PolicyStepResult {
  double loss = 0, grad_norm = 0;
  PolicyStats stats;
  double max_dlogp = 0;   // largest |log pi_theta - recorded| of tokens of the present version
  double mean_dlogp = 0;  // and the mean
  int64_t present_tokens = 0;
  double mean_drift = 0;  // |chunk - replay|, deterministic mode: what the two orders of rounding differ by
  int64_t tokens = 0;     // of all trajectories, observations included
};

class PolicyStep {
 public:
  PolicyStep(LoadedModel& model, PolicyStepOptions options);

  // `version` is that of the present weights. Throws Error when the numerics of rollout and trainer differ by
  // more than they may, or a gradient is not finite; nothing is changed then.
  PolicyStepResult run(std::span<const PolicySample> samples, int64_t version, double lr_multiplier);

  // The same without the update: gradients are left on the weights.
  PolicyStepResult backward(std::span<const PolicySample> samples, int64_t version);

  Optimizer& optimizer() { return optimizer_; }

 private:
  struct Micro;
  void compare(const Micro& micro, const at::Tensor& logp, PolicyStepResult& result) const;
  void micro_batch(const Micro& micro, PolicyStepResult& result);

  LoadedModel& model_;
  PolicyStepOptions options_;
  at::Tensor forbidden_;  // [V] bool
  at::Tensor allowed_;    // ids that can be drawn, ascending
  at::Tensor place_;      // [V] int64: place in allowed_, -1 for the others
  Optimizer optimizer_;
};

}  // namespace godwit::rl
