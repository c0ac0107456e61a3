// The sub-layers of a decoder layer, each a function over its config, weights and normalised input x [T, D].
#pragma once

#include <ATen/core/Tensor.h>

#include "godwit/model/forward.h"

namespace godwit {

// Kimi Delta Attention with output norm and gate (report eq. 1, 2, 5, 6). Advances `state` if given.
at::Tensor kda_layer(const ModelConfig& config, const KdaWeights& w, const at::Tensor& x,
                     const at::Tensor& cu_seqlens, KdaState* state);

struct MlaContext {
  const at::Tensor& cu_seqlens;               // [N+1]
  std::vector<LatentCache>* cache = nullptr;  // [N], or null
  // Where given, receives max logits [H] (see ForwardOptions).
  at::Tensor* max_logit = nullptr;
  double qk_limit = 0.0;
};

// Gated multi-head latent attention (report section 2.1.2, eq. 7): expanded form, or the absorbed form when
// every sequence brings one token to a cache.
at::Tensor mla_layer(const ModelConfig& config, const MlaWeights& w, const at::Tensor& x,
                     const MlaContext& context);

// Gated MLP: down(glu(gate x, up x)).
at::Tensor mlp_layer(const ModelConfig& config, const MlpWeights& w, const at::Tensor& x);

// Stable LatentMoE (report eq. 11, 13). Fills `trace` (all fields but layer and cu_seqlens).
at::Tensor moe_layer(const ModelConfig& config, const MoeWeights& w, const at::Tensor& x, RouterTrace* trace);

}  // namespace godwit
