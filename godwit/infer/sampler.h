// From logits to a token. One definition of the processed distribution: logits / temperature, cut to top-k,
// top-p and min-p, renormalised.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace godwit {

struct SamplingParams {
  double temperature = 1.0;  // 0: the most likely token, ties to the lower id
  double top_p = 1.0;        // smallest set of tokens with at least this probability
  int64_t top_k = 0;         // 0: all
  double min_p = 0.0;        // tokens below this share of the largest probability are cut
  uint64_t seed = 0;
};

struct Sampled {
  int64_t id = 0;
  double logprob = 0.0;  // log-probability of `id` under the model's own distribution (softmax of the logits)
};

// logits [V] fp32 on the CPU; `forbidden` [V] bool or undefined: tokens that are never drawn. The draw is a
// pure function of (seed, position). Throws Error if a logit is NaN, naming the position, or if everything is
// forbidden.
Sampled sample(const at::Tensor& logits, const SamplingParams& params, int64_t position,
               const at::Tensor& forbidden = {});

}  // namespace godwit
