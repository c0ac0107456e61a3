// The model: one function over config, weights, a packed batch and, for inference, a state. Training,
// evaluation, rollouts and serving all call it. Kimi K3 report (arXiv:2607.24653) sections 2.1 to 2.3.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "godwit/model/config.h"
#include "godwit/model/state.h"
#include "godwit/model/weights.h"

namespace godwit {

// N sequences (documents) one after another. Nothing crosses a boundary.
struct PackedBatch {
  at::Tensor ids;         // [T] int64 on the model's device
  at::Tensor cu_seqlens;  // [N+1] int64 on the CPU
  // With a state: which of its sequences these are, all different; empty = all of them, in order. Sequences
  // that bring one token come first (they take the step forms).
  std::vector<int64_t> sequences = {};
  // The first so many sequences take the step forms, token after token, whatever they bring: each row then
  // has the bits of a call of its own. -1: those that bring one token.
  int64_t step_sequences = -1;
  bool record = false;  // the state keeps what replay_steps needs
  // [M, D]: what vision_forward made of the batch's pictures. They take the places of the M tokens with the
  // configuration's media_id, in order. Undefined: those are tokens like others.
  at::Tensor media = {};
};

// What the router of one MoE layer decided.
struct RouterTrace {
  int64_t layer = 0;      // decoder layer
  at::Tensor logits;      // [T, E] fp32, with gradient while training
  at::Tensor experts;     // [T, k] int32
  at::Tensor weights;     // [T, k] fp32
  at::Tensor cutoff;      // [T] fp32, the (k+1)-th biased score
  at::Tensor cu_seqlens;  // [N+1]
};

struct ForwardOptions {
  bool recompute = false;  // training: keep only each layer's inputs and run it again in the backward
  // Called once per MoE layer and forward, not on recomputation. May keep the detached tensors.
  std::function<void(const RouterTrace&)> on_router;
  // A scalar loss term of this layer's routing, added to the training loss through the layer's output; called
  // on recomputation too.
  std::function<at::Tensor(const RouterTrace&)> router_loss;
  // Called once per MLA layer with the largest attention logit of each head [H], for QK-Clip. Heads whose
  // Cauchy-Schwarz bound lies below qk_limit report that bound, so that the exact maximum is computed only
  // where it can matter.
  std::function<void(int64_t layer, const at::Tensor& max_logit_H)> on_max_logit;
  double qk_limit = 100.0;
  // Called with the residual stream after each decoder layer (detached), for activation norms by depth.
  std::function<void(int64_t layer, const at::Tensor& stream)> on_layer;
};

// Final hidden states [T, D] after the last norm; logits = linear(hidden, head_weight()). With a state the
// sequences go on from it and it is advanced; without one they start empty. A state and gradients exclude
// each other. Throws Error when a token id lies outside the vocabulary, the state does not fit the batch or
// has too few pages (nothing is advanced then).
at::Tensor forward_hidden(const ModelConfig& config, const ModelWeights& weights, const PackedBatch& batch,
                          ModelState* state = nullptr, const ForwardOptions& options = {});

// The next tokens of one sequence, with gradients through what it carries: `carried` has an entry a layer,
// `kda` with one row (KDA layers) or `pages` as the rows [begin, R + P] of all its tokens before (MLA
// layers). Each is replaced: `kda` by the state after the batch, `pages` by the rows [T, R + P] of its tokens
// alone. Throws Error for a batch of several sequences, and with options.recompute.
at::Tensor forward_segment(const ModelConfig& config, const ModelWeights& weights, const PackedBatch& batch,
                           int64_t begin, std::vector<LayerState>& carried,
                           const ForwardOptions& options = {});

// The next `tokens` tokens of each of B sequences, whose places lie on the model's device: the work is the
// same whatever they are, so it can be recorded (ops/step_graph.h). For bf16 on a GPU. Row n * tokens + m is
// token m of sequence n.
struct DeviceStep {
  at::Tensor ids;      // [B * tokens] int64
  at::Tensor slots;    // [B] int32: sequence of the state, -1 for one that pads the batch
  at::Tensor rows;     // [B * tokens] int64: where the token's row goes among a layer's flattened pages
  at::Tensor tables;   // [S, M] int32: pages of every sequence of the state
  at::Tensor lengths;  // [B * tokens] int64: rows that it sees, its own among them; 0 for padding
  int64_t tokens = 1;
};
// Hidden states [B * tokens, D] as of forward_hidden. Lengths of the state are the caller's to advance. With
// `kept` the KDA states stay as they are, and keep_device_step(kept, n) later brings the first n [B] int32 of
// the tokens of each sequence to them.
at::Tensor forward_device_step(const ModelConfig& config, const ModelWeights& weights, const DeviceStep& step,
                               ModelState& state, std::vector<ops::KdaDecodeArgs>* kept = nullptr);
void keep_device_step(const std::vector<ops::KdaDecodeArgs>& kept, const at::Tensor& n);

// Brings step rows of the last call with `record` to the KDA states of a sequence again: `count` rows from
// row `first` of that call. The sequence's length is not changed.
void replay_steps(const ModelConfig& config, const ModelWeights& weights, ModelState& state, int64_t sequence,
                  int64_t first, int64_t count);

// [V, D]: lm_head, or the embedding where they are tied.
const Matrix& head_weight(const ModelConfig& config, const ModelWeights& weights);

// logits [T, V] fp32.
at::Tensor forward_logits(const ModelConfig& config, const ModelWeights& weights, const PackedBatch& batch,
                          ModelState* state = nullptr);

// The vectors of `batch.media` that belong to its tokens begin .. begin + n; undefined without pictures.
// Error where there are not as many placeholders as vectors.
at::Tensor media_of(const ModelConfig& config, const PackedBatch& batch, int64_t begin, int64_t n);

// A packed batch from lengths: cu_seqlens [N+1] on the CPU.
at::Tensor make_cu_seqlens(const std::vector<int64_t>& lengths);

}  // namespace godwit
