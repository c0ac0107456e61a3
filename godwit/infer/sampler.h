// From logits to a token. One definition of the processed distribution: logits / temperature, cut to top-k,
// top-p and min-p, renormalised.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "godwit/infer/sampling.h"

namespace godwit {

// Log-probability of `id` under the policy that reinforcement learning trains: softmax of logits /
// temperature over the tokens that are not forbidden. One function and one order of its sums for rollout and
// trainer.
double policy_logprob(const at::Tensor& logits, const at::Tensor& forbidden, double temperature, int64_t id);

// As if `id` had been drawn: its log-probabilities. Throws Error where it may not be drawn.
Sampled forced_token(const at::Tensor& logits, const SamplingParams& params, const at::Tensor& forbidden,
                     int64_t id);

// The number in [0, 1) that decides the draw at a position.
double draw_chance(const SamplingParams& params, int64_t position);

// logits [V] fp32 on the CPU; `forbidden` [V] bool or undefined: tokens that are never drawn; `history` for
// the penalties, or null. The draw is a pure function of (seed, position). Throws Error if a logit is NaN,
// naming the position, or if everything is forbidden.
Sampled sample(const at::Tensor& logits, const SamplingParams& params, int64_t position,
               const at::Tensor& forbidden = {}, const TokenHistory* history = nullptr);

// The `count` likeliest tokens with their log-probabilities, best first, ties to the lower id.
std::vector<std::pair<int32_t, double>> likeliest(const at::Tensor& logits, int64_t count);

}  // namespace godwit
