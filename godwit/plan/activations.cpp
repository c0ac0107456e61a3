#include "godwit/plan/activations.h"

namespace godwit {

KeptValues kept_by_token_mixer(const ModelConfig& config, int64_t layer) {
  KeptValues kept;
  if (config.kda_layer[layer]) {
    const KdaConfig& k = config.kda;
    const auto inner = static_cast<double>(k.heads * k.head_dim), width = static_cast<double>(k.head_dim);
    // q, k, v before and behind the convolutions; decay logits; output; gate; the
    // gated norm of the output, which the output projection keeps.
    kept.model = 6 * inner + 4 * inner;
    kept.model += width + static_cast<double>(k.heads);  // between the two decay projections; beta logits
    if (!k.full_rank_gate) kept.model += width;
    kept.fp32 = inner;                   // values of the delta rule
    kept.fp32 += inner * width / 128.0;  // the state at every 128th token
    return kept;
  }
  const MlaConfig& m = config.mla;
  const auto H = static_cast<double>(m.heads), q = H * static_cast<double>(m.qk_dim()),
             v = H * static_cast<double>(m.v_dim);
  kept.model = 2.0 * static_cast<double>(m.q_lora_rank);  // before and behind its norm
  // Latent before and behind its norm, and the row with the shared key.
  kept.model += 3.0 * static_cast<double>(m.kv_lora_rank) + static_cast<double>(m.rope_dim);
  kept.model += 2 * q + 3 * v;                        // queries, keys; values, output by sequence and packed
  if (m.gate != MlaGate::kNone) kept.model += 2 * v;  // gate, gated output
  if (m.gate == MlaGate::kLocalGlobal) kept.model += 3 * v;
  kept.fp32 = H;  // log-sum-exp of each row
  return kept;
}

KeptValues kept_by_channel_mixer(const ModelConfig& config, int64_t layer) {
  KeptValues kept;
  if (!config.is_moe(layer)) {
    kept.model = 3.0 * static_cast<double>(config.intermediate);  // gate, up, their product
    return kept;
  }
  const MoeConfig& m = config.moe;
  kept.model = 3.0 * static_cast<double>(m.shared_experts * m.inner);
  if (m.latent > 0) kept.model += static_cast<double>(m.latent) * (m.latent_norm ? 3.0 : 2.0);
  kept.fp32 = static_cast<double>(m.experts + 2 * m.experts_per_token);  // scores; choices and their weights
  return kept;
}

KeptValues kept_by_stream(const ModelConfig& config) {
  const auto D = static_cast<double>(config.hidden);
  return {.model = config.attn_res == AttnResKind::kNone ? 4 * D : 6 * D, .fp32 = 0};
}

}  // namespace godwit
