// Kimi Delta Attention layer. Legend: T tokens, N sequences, H heads, K head width, D model width.
#include <ATen/ATen.h>

#include "godwit/model/layers.h"
#include "godwit/ops/ops.h"

namespace godwit {
namespace {

using at::Tensor;

// The convolution, with the sequences' slots of `state` read and written where there is one.
Tensor convolve(const Tensor& x, const Tensor& weight, Tensor* state, const StatePlaces* places,
                const Tensor& cu_seqlens) {
  if (!state) return std::get<0>(ops::short_conv(x, weight, std::nullopt, cu_seqlens));
  const auto [y, last] = ops::short_conv(x, weight, state->index_select(0, places->slots_on), cu_seqlens);
  state->index_copy_(0, places->slots_on, last);
  return y;
}

// One sequence's inputs of the recurrence, [T, ...] each.
struct Inputs {
  Tensor q, k, v, z, b;
  Inputs slice(int64_t from, int64_t to) const {
    return {q.slice(0, from, to), k.slice(0, from, to), v.slice(0, from, to), z.slice(0, from, to),
            b.slice(0, from, to)};
  }
};

}  // namespace

Tensor kda_layer(const ModelConfig& config, const KdaWeights& w, const Tensor& x, const Tensor& cu_seqlens,
                 KdaState* state, const StatePlaces* places) {
  const int64_t T = x.size(0), H = config.kda.heads, K = config.kda.head_dim;
  const auto heads = [&](const Tensor& t) { return t.view({T, H, K}); };
  const auto convolved = [&](const Tensor& proj, const Tensor& weight, Tensor KdaState::*part) {
    return heads(
        convolve(ops::linear(x, proj), weight, state ? &(state->*part) : nullptr, places, cu_seqlens));
  };
  const Inputs in{.q = convolved(w.q_proj, w.q_conv, &KdaState::conv_q),
                  .k = convolved(w.k_proj, w.k_conv, &KdaState::conv_k),
                  .v = convolved(w.v_proj, w.v_conv, &KdaState::conv_v),
                  .z = heads(ops::linear(ops::linear(x, w.f_a), w.f_b)),
                  .b = ops::linear(x, w.b_proj)};
  const Tensor dt_bias = w.dt_bias.view({H, K});
  const double bound = config.kda.gate_lower_bound;
  const auto chunked = [&](const Inputs& part, const std::optional<Tensor>& initial, const Tensor& cu) {
    return ops::kda_chunk(part.q, part.k, part.v, part.z, w.A_log, dt_bias, part.b, bound, initial, cu);
  };

  Tensor o;
  if (!state) {
    o = std::get<0>(chunked(in, std::nullopt, cu_seqlens));
  } else {
    std::vector<Tensor> parts;
    const int64_t steps = places->steps;
    if (steps > 0) {
      const Inputs one = in.slice(0, steps);
      parts.push_back(ops::kda_step(one.q, one.k, one.v, one.z, w.A_log, dt_bias, one.b, bound,
                                    state->recurrent, places->slots.slice(0, 0, steps)));
    }
    if (steps < places->slots.size(0)) {
      const Tensor slots = places->slots_on.slice(0, steps);
      const auto [y, last] = chunked(in.slice(steps, T), state->recurrent.index_select(0, slots),
                                     cu_seqlens.slice(0, steps) - steps);
      state->recurrent.index_copy_(0, slots, last);
      parts.push_back(y);
    }
    o = parts.size() == 1 ? parts[0] : at::cat(parts);
  }
  const Tensor gate =
      config.kda.full_rank_gate ? ops::linear(x, w.g_proj) : ops::linear(ops::linear(x, w.g_a), w.g_b);
  return ops::linear(ops::rms_norm_gated(o, heads(gate), w.o_norm, config.rms_norm_eps).view({T, H * K}),
                     w.o_proj);
}

}  // namespace godwit
