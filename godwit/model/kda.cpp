// Kimi Delta Attention layer. Legend: T tokens, N sequences, H heads, K head width, D model width.
#include <ATen/ATen.h>

#include <tuple>

#include "godwit/model/layers.h"
#include "godwit/ops/layer_step.h"
#include "godwit/ops/linear_each.h"
#include "godwit/ops/ops.h"

namespace godwit {
namespace {

using at::Tensor;

// The convolution, with the sequences' slots of `state` read and written where there is one; without places
// the state is the sequences' own and is replaced.
Tensor convolve(const Tensor& x, const Tensor& weight, Tensor* state, const StatePlaces* places,
                const Tensor& cu_seqlens) {
  if (!state) return std::get<0>(ops::short_conv(x, weight, std::nullopt, cu_seqlens));
  if (!places) {
    Tensor y;
    std::tie(y, *state) = ops::short_conv(x, weight, *state, cu_seqlens);
    return y;
  }
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

ops::KdaLayerStep layer_step(const ModelConfig& config, const KdaWeights& w, const KdaState& state,
                             const Tensor& slots) {
  const bool full = config.kda.full_rank_gate;
  return {.q = &w.q_proj,
          .k = &w.k_proj,
          .v = &w.v_proj,
          .f_a = &w.f_a,
          .f_b = &w.f_b,
          .b = &w.b_proj,
          .g = full ? &w.g_proj : &w.g_a,
          .g_b = full ? nullptr : &w.g_b,
          .o = &w.o_proj,
          .q_conv = w.q_conv,
          .k_conv = w.k_conv,
          .v_conv = w.v_conv,
          .A_log = w.A_log,
          .dt_bias = w.dt_bias,
          .o_norm = w.o_norm,
          .heads = config.kda.heads,
          .head_dim = config.kda.head_dim,
          .gate_bound = config.kda.gate_lower_bound,
          .norm_eps = config.rms_norm_eps,
          .conv_q = state.conv_q,
          .conv_k = state.conv_k,
          .conv_v = state.conv_v,
          .recurrent = state.recurrent,
          .slots = slots};
}

// kda_step for rows of which neighbours may belong to one sequence: those one after another.
Tensor step_rows(const ModelConfig& config, const KdaWeights& w, const Inputs& in, Tensor& recurrent,
                 const Tensor& slots) {
  const Tensor dt_bias = w.dt_bias.view({config.kda.heads, config.kda.head_dim});
  const auto step = [&](const Inputs& part, const Tensor& where) {
    return ops::kda_step(part.q, part.k, part.v, part.z, w.A_log, dt_bias, part.b,
                         config.kda.gate_lower_bound, recurrent, where);
  };
  const int64_t rows = slots.size(0);
  const auto* slot = slots.const_data_ptr<int64_t>();
  std::vector<Tensor> parts;
  for (int64_t from = 0; from < rows;) {
    int64_t to = from + 1;  // rows of different sequences go together
    while (to < rows && slot[to] != slot[to - 1]) ++to;
    parts.push_back(step(in.slice(from, to), slots.slice(0, from, to)));
    from = to;
  }
  return parts.size() == 1 ? parts[0] : at::cat(parts);
}

}  // namespace

void kda_replay(const ModelConfig& config, const KdaWeights& w, KdaState& state, const Tensor& inputs,
                const Tensor& slots) {
  if (ops::takes_layer_step(state.recurrent) && inputs.scalar_type() == at::kFloat) {
    return ops::kda_replay(layer_step(config, w, state, slots), inputs);
  }
  const int64_t T = inputs.size(0), H = config.kda.heads, K = config.kda.head_dim, C = H * K;
  const Tensor place = slots.narrow(0, 0, 1).to(inputs.device());
  const Tensor cu = at::tensor({int64_t{0}, T}, at::kLong);
  const auto convolved = [&](int64_t part, const Tensor& weight, Tensor& past) {
    const auto [y, last] =
        ops::short_conv(inputs.narrow(1, part * C, C), weight, past.index_select(0, place), cu);
    past.index_copy_(0, place, last);
    return y.view({T, H, K});
  };
  const Inputs in{.q = convolved(0, w.q_conv, state.conv_q),
                  .k = convolved(1, w.k_conv, state.conv_k),
                  .v = convolved(2, w.v_conv, state.conv_v),
                  .z = inputs.narrow(1, 3 * C, C).reshape({T, H, K}),
                  .b = inputs.narrow(1, 4 * C, H)};
  step_rows(config, w, in, state.recurrent, slots);
}

Tensor kda_layer(const ModelConfig& config, const KdaWeights& w, const Tensor& x, const Tensor& cu_seqlens,
                 KdaState* state, const StatePlaces* places) {
  const int64_t T = x.size(0), H = config.kda.heads, K = config.kda.head_dim;
  if (places && places->fused) {
    return ops::kda_layer_step(layer_step(config, w, *state, places->step_slots), x,
                               places->record ? &state->step_inputs : nullptr);
  }
  const auto gate_of = [&] {
    return config.kda.full_rank_gate ? ops::linear(x, w.g_proj) : ops::linear(ops::linear(x, w.g_a), w.g_b);
  };
  if (places && places->on_device) {
    const bool full = config.kda.full_rank_gate;
    const std::vector<Tensor> y =
        ops::linear_each(x, {&w.q_proj, &w.k_proj, &w.v_proj, &w.f_a, &w.b_proj, full ? &w.g_proj : &w.g_a});
    ops::KdaDecodeArgs args{.q = y[0],
                            .k = y[1],
                            .v = y[2],
                            .z = ops::linear(y[3], w.f_b),
                            .gate = full ? y[5] : ops::linear(y[5], w.g_b),
                            .b = y[4],
                            .q_conv = w.q_conv,
                            .k_conv = w.k_conv,
                            .v_conv = w.v_conv,
                            .A_log = w.A_log,
                            .dt_bias = w.dt_bias.view({H, K}),
                            .o_norm = w.o_norm,
                            .gate_bound = config.kda.gate_lower_bound,
                            .norm_eps = config.rms_norm_eps,
                            .conv_q = state->conv_q,
                            .conv_k = state->conv_k,
                            .conv_v = state->conv_v,
                            .state = state->recurrent,
                            .slots = places->step_slots,
                            .keep = places->kept ? std::optional(places->keep) : std::nullopt,
                            .tokens = places->tokens};
    if (places->kept) places->kept->push_back(args);
    return ops::linear(ops::kda_decode(args), w.o_proj);
  }
  const auto heads = [&](const Tensor& t) { return t.view({T, H, K}); };
  std::vector<Tensor> projected;
  const auto convolved = [&](const Matrix& proj, const Tensor& weight, Tensor KdaState::*part) {
    const Tensor y = ops::linear(x, proj);
    if (places && places->record) projected.push_back(y.slice(0, 0, places->steps));
    return heads(convolve(y, weight, state ? &(state->*part) : nullptr, places, cu_seqlens));
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
  } else if (!places) {
    std::tie(o, state->recurrent) = chunked(in, state->recurrent, cu_seqlens);
  } else {
    std::vector<Tensor> parts;
    const int64_t steps = places->steps;
    if (steps > 0) {
      const Inputs rows = in.slice(0, steps);
      if (places->record) {
        projected.insert(projected.end(), {rows.z.flatten(1), rows.b});
        state->step_inputs = at::cat(projected, 1);
      }
      parts.push_back(step_rows(config, w, rows, state->recurrent, places->step_slots));
    }
    if (steps < T || steps == 0) {
      const Tensor slots = places->slots_on.slice(0, places->step_sequences);
      const auto [y, last] = chunked(in.slice(steps, T), state->recurrent.index_select(0, slots),
                                     cu_seqlens.slice(0, places->step_sequences) - steps);
      state->recurrent.index_copy_(0, slots, last);
      parts.push_back(y);
    }
    o = parts.size() == 1 ? parts[0] : at::cat(parts);
  }
  return ops::linear(ops::rms_norm_gated(o, heads(gate_of()), w.o_norm, config.rms_norm_eps).view({T, H * K}),
                     w.o_proj);
}

}  // namespace godwit
