// Policy losses: one interface for the objectives of agentic reinforcement learning.
//
// rho_t = pi_theta(y_t) / pi_b(y_t), b the policy that sampled the token; rho'_t = pi_theta(y_t) /
// pi_old(y_t), old the trainer's policy before the update (the behaviour policy where none is given); A_t
// advantage; w_t weight of a token (token_weights); sg stop-gradient. Minimised is sum_t w_t c_t l_t plus the
// two regularisers:
//
//   kClipBand    l = -Clip(rho, ratio_min, ratio_max) A (Kimi K2.5, arXiv:2602.02276; reused by Kimi K3): a
//                token outside the band has no policy gradient, whatever the sign of A
//   kGrpo, kDrGrpo, kDapo, kDecoupled
//                l = -min(rho' A, Clip(rho', 1 - clip_low, 1 + clip_high) A)
//   kGspo        the same with s = exp(mean_t log rho') of the sequence in place of rho'; the gradient of s_t
//                is s times that of the token's own log pi (arXiv:2507.18071 eq. 14)
//   kCispo       l = -sg[Clip(rho', 1 - clip_low, 1 + clip_high)] A log pi_theta (arXiv:2506.13585)
//
//   c_t          correction by sg[pi_old / pi_b]: none, itself (kDecoupled's default, arXiv:2505.24298), cut
//   at
//                correction_max (truncated importance sampling), or 0 outside [correction_min,
//                correction_max] (IcePop)
//   + w_t tau (log rho)^2                        on every token, inside the band or not
//   + w_t kl (exp(d) - d - 1), d = log pi_reference - log pi_theta
//
// Everything is computed on the tokens that the mask selects and on nothing else: what stands at another
// place, be it infinite or NaN, enters no sum, no denominator, no statistic, and its gradient is zero.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace godwit::rl {

enum class Objective { kClipBand, kGrpo, kDrGrpo, kDapo, kGspo, kCispo, kDecoupled };
enum class Correction { kNone, kWeight, kTruncate, kMask };

// What the sum over tokens is divided by. G groups, K_g sequences in a group, |y| model tokens of a sequence.
enum class TokenMean {
  kTokens,       // 1 / N, N all model tokens
  kGroupTokens,  // 1 / (G N_g)
  kSequences,    // 1 / (G K_g |y|)
  kConstant,     // 1 / (G K_g constant_tokens)
};

struct ObjectiveOptions {
  Objective objective = Objective::kClipBand;
  double ratio_min = 0.5, ratio_max = 2;
  double clip_low = 0.2, clip_high = 0.2;
  double tau = 1e-3;
  double kl = 0;
  Correction correction = Correction::kNone;
  double correction_min = 0.5, correction_max = 2;
  TokenMean mean = TokenMean::kTokens;
  double constant_tokens = 1024;
  bool operator==(const ObjectiveOptions&) const = default;
};

// The options that a published objective is usually run with.
ObjectiveOptions default_options(Objective objective);

struct PolicyBatch {
  at::Tensor logp;       // [T] log pi_theta of each token, with gradient
  at::Tensor behaviour;  // [T] log pi_b
  at::Tensor old;        // [T] log pi_old, or undefined: pi_b
  at::Tensor reference;  // [T] log pi_reference, or undefined: no such term
  at::Tensor advantage;  // [T]
  at::Tensor mask;       // [T] bool: tokens that the model wrote
  at::Tensor sequence;   // [T] int64, ascending or not; needed by kGspo
  at::Tensor weight;     // [T] of token_weights, over the whole batch
  at::Tensor entropy;    // [T] of the distribution each token was drawn from, or undefined; statistics only
};

// w_t of each token, fp64 [T]; 0 where the mask is false. mask [T] bool, sequence [T] int64, group [S] int64
// of each sequence. Over the whole batch of a step, so that it may be cut into micro-batches afterwards.
at::Tensor token_weights(const ObjectiveOptions& options, const at::Tensor& mask, const at::Tensor& sequence,
                         const std::vector<int64_t>& group);

// Sums over model tokens; d = log pi_theta - log pi_b. Add up the micro-batches, then read.
struct PolicyStats {
  double tokens = 0;
  double abs_delta = 0;  // |d|
  double max_delta = 0;  // largest |d|
  double k3 = 0;         // exp(d) - d - 1: an estimate of KL(b || theta)
  double over_ln2 = 0;   // tokens with |d| > ln 2
  double ratio = 0, ratio_squared = 0;
  double cut = 0;  // tokens whose policy gradient was cut by a band, a clip or a correction
  double entropy = 0;

  void add(const PolicyStats& other);
  double mean(double sum) const { return tokens > 0 ? sum / tokens : 0; }
  // Effective sample size as a share of the tokens.
  double effective_share() const { return ratio_squared > 0 ? ratio * ratio / (ratio_squared * tokens) : 1; }
};

struct PolicyLoss {
  at::Tensor loss;  // scalar, to be minimised
  PolicyStats stats;
};

// Throws Error when shapes do not fit or a value at a model token is not finite.
PolicyLoss policy_loss(const ObjectiveOptions& options, const PolicyBatch& batch);

}  // namespace godwit::rl
