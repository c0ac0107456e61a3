// Dense MLP and Stable LatentMoE. Legend: T tokens, D model width, L latent width, E experts, k experts a
// token.
#include <ATen/ATen.h>

#include "godwit/model/layers.h"
#include "godwit/ops/layer_step.h"
#include "godwit/ops/linear_each.h"
#include "godwit/ops/linear_wide.h"
#include "godwit/ops/moe_routing.h"
#include "godwit/ops/ops.h"

namespace godwit {

using at::Tensor;

Tensor mlp_layer(const ModelConfig& config, const MlpWeights& w, const Tensor& x) {
  const std::vector<Tensor> y = ops::linear_each(x, {&w.gate, &w.up});
  return ops::linear(ops::glu(y[0], y[1], config.glu_gate_beta(), config.glu_up_beta()), w.down);
}

Tensor moe_layer(const ModelConfig& config, const MoeWeights& w, const Tensor& x, RouterTrace* trace) {
  const MoeConfig& m = config.moe;
  const Tensor z = m.latent > 0 ? ops::linear(x, w.down) : x;  // [T, L]
  const Tensor& seen = m.router_input == RouterInput::kLatent ? z : x;
  const Tensor logits = ops::linear_wide(seen, w.router);
  const auto [weights, experts, cutoff] = ops::moe_route(logits, w.router_bias, m.experts_per_token,
                                                         m.renormalize, m.scale, m.groups, m.topk_groups);
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
              .cutoff = cutoff,
              .cu_seqlens = {}};
  return w.shared ? u + mlp_layer(config, *w.shared, x) : u;
}

static ops::MlpLayerStep mlp_step(const ModelConfig& config, const MlpWeights& w) {
  return {.gate = &w.gate,
          .up = &w.up,
          .down = &w.down,
          .beta_gate = config.glu_gate_beta(),
          .beta_up = config.glu_up_beta()};
}

Tensor mlp_layer_step(const ModelConfig& config, const MlpWeights& w, const Tensor& x) {
  return ops::mlp_layer_step(mlp_step(config, w), x);
}

Tensor moe_layer_step(const ModelConfig& config, const MoeWeights& w, const Tensor& x) {
  const MoeConfig& m = config.moe;
  const bool latent = m.latent > 0;
  return ops::moe_layer_step({.router = &w.router,
                              .down = latent ? &w.down : nullptr,
                              .up = latent ? &w.up : nullptr,
                              .w1 = &w.w1,
                              .w3 = &w.w3,
                              .w2 = &w.w2,
                              .shared = w.shared ? mlp_step(config, *w.shared) : ops::MlpLayerStep{},
                              .router_bias = w.router_bias,
                              .norm = latent && m.latent_norm ? w.norm : Tensor(),
                              .router_sees_latent = latent && m.router_input == RouterInput::kLatent,
                              .k = m.experts_per_token,
                              .groups = m.groups,
                              .topk_groups = m.topk_groups,
                              .renormalize = m.renormalize,
                              .scale = m.scale,
                              .beta_gate = config.glu_gate_beta(),
                              .beta_up = config.glu_up_beta(),
                              .norm_eps = config.rms_norm_eps},
                             x);
}

}  // namespace godwit
