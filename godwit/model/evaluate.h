// Losses and predictions of a model on given tokens, at any length with flat memory: long sequences go
// through in pieces on a carried state, logits are never all held.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "godwit/model/forward.h"

namespace godwit {

// Tokens that go through the model at once.
inline constexpr int64_t kEvaluationPiece = 8192;

// Final hidden states [n, D] of the one sequence of `batch` in pieces of up to `piece` tokens, in order;
// `begin` is the piece's first position.
void for_each_piece(const ModelConfig& config, const ModelWeights& weights, const PackedBatch& batch,
                    int64_t piece, const std::function<void(int64_t begin, const at::Tensor& hidden)>& visit);

// Negative log-likelihood in nats of targets [T] int64 (-100: none, its loss is 0), [T] fp32 on the CPU.
// Neighbouring sequences of the batch go together as long as they have at most `piece` tokens; a longer one
// goes alone, in pieces.
at::Tensor token_losses(const ModelConfig& config, const ModelWeights& weights, const PackedBatch& batch,
                        const at::Tensor& targets, int64_t piece = kEvaluationPiece);

// The likeliest token after each row of `hidden` [n, D]; ties to the lower id. [n] int64 on the CPU.
at::Tensor likeliest_tokens(const ModelConfig& config, const ModelWeights& weights, const at::Tensor& hidden);

// Mean loss by how many tokens came before: buckets 1, 2-3, 4-7, 8-15, ...
class LossByPosition {
 public:
  struct Bucket {
    int64_t begin = 0, end = 0;  // tokens before the target: begin <= n < end
    int64_t tokens = 0;
    double nats = 0.0;  // mean
  };

  void add(int64_t tokens_before, double nats);
  // The losses of a batch by the place in its sequence; targets of -100 do not count.
  void add(const at::Tensor& losses, const at::Tensor& targets, const at::Tensor& cu_seqlens);

  std::vector<Bucket> buckets() const;  // those with tokens
  int64_t tokens() const;
  double total_nats() const;

 private:
  std::vector<int64_t> counts_;  // [k]: 2^k <= n < 2^(k+1)
  std::vector<double> sums_;
};

}  // namespace godwit
