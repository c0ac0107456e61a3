// One update of the policy from finished trajectories: their log-probabilities under the present weights, the
// objective, its gradient, the optimiser.
//
// One numerics. In deterministic mode log pi_theta of each token is the replayed one (replay.h; on a GPU,
// where a row's bits depend on its batch, the present phase's tokens as Rollouts::repeat() gives them), and
// the gradient is that of the chunked forward, which is the same function rounded in another order:
//   logp = chunk + sg[replay - chunk].
// Tokens that these very weights drew, on what these weights had read, must then have exactly the
// log-probability that the rollout recorded; a difference is an error. Otherwise logp is the chunked
// forward's, the difference is measured, and a bound on it stops the run.
//
// The router's balance bias is frozen: reinforcement learning does not move it.
//
// A trajectory longer than `segment_tokens` is trained a segment at a time (model/segments.h): the same
// gradient, credit for its first decision included, in memory that does not grow with a graph of its length.
//
// Quantisation-aware training (`mxfp4_experts`): the experts' weights in the model are those that MXFP4 can
// say, and the optimiser moves fp32 masters that are rounded to them after every step (straight-through: the
// gradient by the rounded weight moves the master). Rollout and trainer read the one rounded copy, so nothing
// differs between them, and `godwit convert --dtype mxfp4` of the result changes no weight.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <tuple>
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
  int64_t segment_tokens = 0;  // a multiple of kLatentPage; 0 = every trajectory at once
  bool mxfp4_experts = false;
};

struct PolicySample {
  const Trajectory* trajectory = nullptr;
  std::vector<double> advantages;             // one a turn
  std::vector<double> token_advantages = {};  // empty, or one for each id: added to its turn's
  // Where given, the trainer's log-probability of each id by the rollout's own calls; NaN where there is
  // none: that of the chunked forward counts there. Otherwise deterministic mode replays.
  std::vector<double> repeated = {};
};

struct PolicyStepResult {
  double loss = 0, grad_norm = 0;
  PolicyStats stats;
  double max_dlogp = 0;   // largest |log pi_theta - recorded| of tokens of the present version
  double mean_dlogp = 0;  // and the mean
  int64_t present_tokens = 0;
  double mean_drift = 0;  // |chunk - replay|, deterministic mode: what the two orders of rounding differ by
  int64_t tokens = 0;     // of all trajectories, observations included

  // What was compared elsewhere counts too.
  void add_compared(const PolicyStepResult& other);
};

class PolicyStep {
 public:
  PolicyStep(LoadedModel& model, PolicyStepOptions options);

  // `version` is that of the present weights. Throws Error when the numerics of rollout and trainer differ by
  // more than they may, or a gradient is not finite; nothing is changed then.
  PolicyStepResult run(std::span<const PolicySample> samples, int64_t version, double lr_multiplier);

  // The same without the update: gradients are left on the weights.
  PolicyStepResult backward(std::span<const PolicySample> samples, int64_t version);

  // Deterministic mode: compares what the present weights drew of trajectories that will be trained on later,
  // when these weights are gone: max_dlogp, mean_dlogp and present_tokens of the result. Throws as run.
  PolicyStepResult verify(std::span<const PolicySample> samples, int64_t version);

  Optimizer& optimizer() { return optimizer_; }

  // The optimiser's, and the experts' masters.
  void for_each_state(const StateVisitor& visit);

 private:
  struct Micro;
  void compare(const Micro& micro, const at::Tensor& logp, PolicyStepResult& result) const;
  std::tuple<at::Tensor, at::Tensor> score(const Micro& micro, const at::Tensor& hidden, int64_t first,
                                           const at::Tensor& weight) const;
  at::Tensor objective(const Micro& micro, const at::Tensor& chunk, PolicyStepResult& result) const;
  void micro_batch(const Micro& micro, PolicyStepResult& result);
  void segmented(const Micro& micro, PolicyStepResult& result);
  std::vector<OptimizerParam> optimizer_params();
  void round_experts();

  LoadedModel& model_;
  PolicyStepOptions options_;
  struct Master {
    std::string name;
    at::Tensor value;    // fp32, what the optimiser moves
    at::Tensor rounded;  // the model's weight
  };
  std::vector<Master> masters_;  // with mxfp4_experts
  at::Tensor forbidden_;         // [V] bool
  at::Tensor allowed_;           // ids that can be drawn, ascending
  at::Tensor place_;             // [V] int64: place in allowed_, -1 for the others
  Optimizer optimizer_;
};

}  // namespace godwit::rl
