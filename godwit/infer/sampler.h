// From logits to a token. One definition of the processed distribution: logits / temperature, cut to top-k,
// top-p and min-p, renormalised.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace godwit {

struct SamplingParams {
  double temperature = 1.0;  // 0: the most likely token, ties to the lower id
  double top_p = 1.0;        // smallest set of tokens with at least this probability
  int64_t top_k = 0;         // 0: all
  double min_p = 0.0;        // tokens below this share of the largest probability are cut
  uint64_t seed = 0;
  // Taken off the logits of tokens that were drawn before: once, and for each time.
  double presence_penalty = 0.0, frequency_penalty = 0.0;
  // Logits of tokens of the prompt or drawn are divided by it where positive, multiplied where negative
  // (Keskar et al., arXiv:1909.05858).
  double repetition_penalty = 1.0;
  std::vector<std::pair<int32_t, double>> logit_bias = {};  // added to the logits of these ids
};

// What the penalties look at.
struct TokenHistory {
  std::unordered_map<int32_t, int32_t> drawn;  // how often
  std::unordered_set<int32_t> prompt;
};

struct Sampled {
  int64_t id = 0;
  double logprob = 0.0;  // log-probability of `id` under the model's own distribution (softmax of the logits)
};

// logits [V] fp32 on the CPU; `forbidden` [V] bool or undefined: tokens that are never drawn; `history` for
// the penalties, or null. The draw is a pure function of (seed, position). Throws Error if a logit is NaN,
// naming the position, or if everything is forbidden.
Sampled sample(const at::Tensor& logits, const SamplingParams& params, int64_t position,
               const at::Tensor& forbidden = {}, const TokenHistory* history = nullptr);

// The `count` likeliest tokens with their log-probabilities, best first, ties to the lower id.
std::vector<std::pair<int32_t, double>> likeliest(const at::Tensor& logits, int64_t count);

}  // namespace godwit
