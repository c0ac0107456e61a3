// The log-probabilities of sampled tokens under a model's present weights, by the engine's own arithmetic:
// the same kernel calls at the same positions (a prompt in chunked form up to whole pages and then to its
// end, drawn tokens in the step form), teacher-forced. With the weights that drew the tokens the result
// equals what the rollout recorded, bit for bit, where the engine is exact (docs/inference.md: fp32 on the
// CPU).
#pragma once

#include <span>
#include <vector>

#include "godwit/infer/model.h"
#include "godwit/rl/trajectory.h"

namespace godwit::rl {

struct Replayed {
  std::vector<double> logp;     // one for each id, policy_logprob; 0 where the model did not draw it
  std::vector<double> entropy;  // nats, of the distribution it was drawn from; 0 elsewhere
};

// `forbidden` [V] bool as for the rollout; `together`: trajectories at a time.
std::vector<Replayed> replay(const LoadedModel& model, std::span<const Trajectory* const> trajectories,
                             const at::Tensor& forbidden, double temperature, int64_t together = 32);

// The tokens that no rollout draws: all special ones but those of the chat format.
at::Tensor rollout_forbidden(const LoadedModel& model);

}  // namespace godwit::rl
