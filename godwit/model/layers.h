// The sub-layers of a decoder layer, each a function over its config, weights and normalised input x [T, D].
#pragma once

#include <ATen/core/Tensor.h>

#include "godwit/model/forward.h"

namespace godwit {

// Where the sequences of one call with a state stand in it; the same for every layer.
struct StatePlaces {
  int64_t step_sequences = 0;  // the first sequences, whose tokens take the step forms
  int64_t steps = 0;           // their tokens, the first rows
  at::Tensor slots;            // [N] int64 on the CPU
  at::Tensor slots_on;         // the same on the model's device
  at::Tensor table;            // [N, M] int32 on the CPU: pages of each sequence
  at::Tensor lengths;          // [N] int64 on the CPU: tokens of each sequence after this call
  at::Tensor rows;  // [T] int64 on the device: where the new tokens' rows lie in a layer's flattened pages
  // By step row, on the CPU: slot [steps] int64; what it sees, [steps, M] int32 and [steps] int64.
  at::Tensor step_slots, step_table, step_lengths;
  bool on_device = false;  // the step rows' places lie on the device, slots int32, -1 for padding
  // On the device: tokens of each sequence, whose slots are [N]; with `kept`, which takes what the KDA layers
  // were given, `keep` [N] int32 says after how many of them the states are written back.
  int64_t tokens = 1;
  at::Tensor keep;
  std::vector<ops::KdaDecodeArgs>* kept = nullptr;
  bool record = false;  // keep the step rows' inputs in KdaState::step_inputs
  bool fused = false;   // all rows are steps and of the kind that ops/layer_step.h takes
};

// Kimi Delta Attention with output norm and gate (report eq. 1, 2, 5, 6). Advances `state` if given, together
// with `places`; without places its tensors have a row a sequence and are replaced by new ones, with
// gradient.
at::Tensor kda_layer(const ModelConfig& config, const KdaWeights& w, const at::Tensor& x,
                     const at::Tensor& cu_seqlens, KdaState* state, const StatePlaces* places);

// Step rows' inputs (KdaState::step_inputs) brought to the states again, without the layer's output. slots
// [rows] int64 on the CPU: rows of one sequence follow one another.
void kda_replay(const ModelConfig& config, const KdaWeights& w, KdaState& state, const at::Tensor& inputs,
                const at::Tensor& slots);

struct MlaContext {
  const at::Tensor& cu_seqlens;         // [N+1]
  const at::Tensor& position;           // [T] int64 on the device, used by rotation alone
  at::Tensor* pages = nullptr;          // of this layer, or null
  const StatePlaces* places = nullptr;  // goes with `pages`
  // Without pages: the rows [S, R + P] of the one sequence's tokens before these, replaced by the rows [T, R
  // + P] of these, with gradient.
  at::Tensor* rows = nullptr;
  // Where given, receives max logits [H] (see ForwardOptions).
  at::Tensor* max_logit = nullptr;
  double qk_limit = 0.0;
};

// Gated multi-head latent attention (report section 2.1.2, eq. 7): expanded form, or the absorbed form for
// sequences that bring one token to their pages.
at::Tensor mla_layer(const ModelConfig& config, const MlaWeights& w, const at::Tensor& x,
                     const MlaContext& context);

// Gated MLP: down(glu(gate x, up x)).
at::Tensor mlp_layer(const ModelConfig& config, const MlpWeights& w, const at::Tensor& x);

// The same on rows that ops/layer_step.h takes.
at::Tensor mlp_layer_step(const ModelConfig& config, const MlpWeights& w, const at::Tensor& x);
at::Tensor moe_layer_step(const ModelConfig& config, const MoeWeights& w, const at::Tensor& x);

// Stable LatentMoE (report eq. 11, 13). Fills `trace` (all fields but layer and cu_seqlens).
at::Tensor moe_layer(const ModelConfig& config, const MoeWeights& w, const at::Tensor& x, RouterTrace* trace);

}  // namespace godwit
