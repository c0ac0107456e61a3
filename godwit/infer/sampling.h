// How tokens are drawn, and what is known of a drawn one. No tensors here, so that what reads and writes
// requests builds without LibTorch.
#pragma once

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
  bool policy_logprob = false;                              // wanted: Sampled::policy_logprob
};

// What the penalties look at.
struct TokenHistory {
  std::unordered_map<int32_t, int32_t> drawn;  // how often
  std::unordered_set<int32_t> prompt;
};

struct Sampled {
  int64_t id = 0;
  double logprob = 0.0;  // log-probability of `id` under the model's own distribution (softmax of the logits)
  double policy_logprob = 0.0;  // sampler.h; 0 unless params ask for it
};

struct DrawnToken {
  int32_t id = 0;
  double logprob = 0.0;                              // under the model's own distribution
  double policy_logprob = 0.0;                       // sampler.h; 0 unless the sampling asks for it
  std::vector<std::pair<int32_t, double>> top = {};  // the likeliest tokens, best first
};

}  // namespace godwit
