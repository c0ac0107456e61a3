// Kimi Delta Attention layer. Legend: T tokens, N sequences, H heads, K head width, D model width.
#include <ATen/ATen.h>

#include "godwit/model/layers.h"
#include "godwit/ops/ops.h"

namespace godwit {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor> convolve(const Tensor& x, const Tensor& weight, const Tensor& state,
                                    const Tensor& cu_seqlens) {
  const std::optional<Tensor> initial = state.defined() ? std::optional<Tensor>(state) : std::nullopt;
  return ops::short_conv(x, weight, initial, cu_seqlens);
}

}  // namespace

Tensor kda_layer(const ModelConfig& config, const KdaWeights& w, const Tensor& x, const Tensor& cu_seqlens,
                 KdaState* state) {
  const int64_t T = x.size(0), H = config.kda.heads, K = config.kda.head_dim, N = cu_seqlens.numel() - 1;
  const KdaState none;
  const KdaState& in = state ? *state : none;
  const auto [q, conv_q] = convolve(ops::linear(x, w.q_proj), w.q_conv, in.conv_q, cu_seqlens);
  const auto [k, conv_k] = convolve(ops::linear(x, w.k_proj), w.k_conv, in.conv_k, cu_seqlens);
  const auto [v, conv_v] = convolve(ops::linear(x, w.v_proj), w.v_conv, in.conv_v, cu_seqlens);
  const Tensor z = ops::linear(ops::linear(x, w.f_a), w.f_b);
  const Tensor b = ops::linear(x, w.b_proj);
  const auto heads = [&](const Tensor& t) { return t.view({T, H, K}); };
  const Tensor dt_bias = w.dt_bias.view({H, K});
  const double bound = config.kda.gate_lower_bound;

  Tensor o;
  if (state && T == N) {  // one token each
    o = ops::kda_step(heads(q), heads(k), heads(v), heads(z), w.A_log, dt_bias, b, bound, state->recurrent);
  } else {
    const std::optional<Tensor> initial = state ? std::optional<Tensor>(in.recurrent) : std::nullopt;
    Tensor final_state;
    std::tie(o, final_state) = ops::kda_chunk(heads(q), heads(k), heads(v), heads(z), w.A_log, dt_bias, b,
                                              bound, initial, cu_seqlens);
    if (state) state->recurrent = final_state;
  }
  if (state) {
    state->conv_q = conv_q;
    state->conv_k = conv_k;
    state->conv_v = conv_v;
  }
  const Tensor gate =
      config.kda.full_rank_gate ? ops::linear(x, w.g_proj) : ops::linear(ops::linear(x, w.g_a), w.g_b);
  return ops::linear(ops::rms_norm_gated(o, heads(gate), w.o_norm, config.rms_norm_eps).view({T, H * K}),
                     w.o_proj);
}

}  // namespace godwit
