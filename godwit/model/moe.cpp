// Dense MLP and Stable LatentMoE. Legend: T tokens, D model width, L latent width, E experts, k experts a
// token.
#include <ATen/ATen.h>

#include "godwit/model/layers.h"
#include "godwit/ops/ops.h"

namespace godwit {

using at::Tensor;

Tensor mlp_layer(const ModelConfig& config, const MlpWeights& w, const Tensor& x) {
  return ops::linear(
      ops::glu(ops::linear(x, w.gate), ops::linear(x, w.up), config.glu_gate_beta(), config.glu_up_beta()),
      w.down);
}

Tensor moe_layer(const ModelConfig& config, const MoeWeights& w, const Tensor& x, RouterTrace* trace) {
  const MoeConfig& m = config.moe;
  const Tensor z = m.latent > 0 ? ops::linear(x, w.down) : x;  // [T, L]
  const Tensor& seen = m.router_input == RouterInput::kLatent ? z : x;
  const at::ScalarType type = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const Tensor logits = ops::linear(seen.to(type), w.router.to(type));
  const auto [weights, experts, scores, cutoff] = ops::moe_router(
      logits, w.router_bias, m.experts_per_token, m.renormalize, m.scale, m.groups, m.topk_groups);
  Tensor u =
      ops::moe_experts(z, experts, weights, w.w1, w.w3, w.w2, config.glu_gate_beta(), config.glu_up_beta());
  if (m.latent > 0) {
    if (m.latent_norm) u = ops::rms_norm(u, w.norm, config.rms_norm_eps);
    u = ops::linear(u, w.up);
  }
  if (trace)
    *trace = {.layer = 0,
              .logits = logits,
              .experts = experts,
              .weights = weights,
              .scores = scores,
              .cutoff = cutoff,
              .cu_seqlens = {}};
  return w.shared ? u + mlp_layer(config, *w.shared, x) : u;
}

}  // namespace godwit
