// One decode step of a KDA layer (docs/kda.md): schema, and the composition of the ops that a fused kernel
// replaces. CompositeExplicitAutograd serves every backend without such a kernel.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <string>
#include <utility>
#include <vector>

#include "godwit/ops/autograd_util.h"
#include "godwit/ops/checks.h"
#include "godwit/ops/kda_decode.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/traced.h"

namespace godwit::ops {
namespace {

// The states are passed as mutable references by the schema; a Tensor is a handle, so copies serve.
Tensor call(const char* name, const KdaDecodeArgs& a) {
  const auto op = typed_handle<KdaDecodeSignature>(name);
  Tensor conv_q = a.conv_q, conv_k = a.conv_k, conv_v = a.conv_v, state = a.state;
  return op.call(a.q, a.k, a.v, a.z, a.gate, a.b, a.q_conv, a.k_conv, a.v_conv, a.A_log, a.dt_bias, a.o_norm,
                 a.gate_bound, a.norm_eps, conv_q, conv_k, conv_v, state, a.slots, a.keep, a.tokens);
}

void check_index(const char* name, const Tensor& x, int64_t rows, const at::Device& device) {
  check_sizes("kda_decode", name, x, {rows});
  check_dtype("kda_decode", name, x, at::kInt);
  check_device("kda_decode", name, x, device);
}

// On a GPU the caller vouches for them: looking would wait for it.
void check_slots(const Tensor& slots, int64_t states) {
  const Tensor dense = slots.contiguous();
  const auto* slot = dense.const_data_ptr<int32_t>();
  std::vector<bool> taken(states);
  for (int64_t n = 0; n < dense.numel(); ++n) {
    if (slot[n] < 0) continue;
    TORCH_CHECK(slot[n] < states && !taken[slot[n]], "kda_decode: slots: expected distinct slots below ",
                states, ", got ", slot[n], " at ", n);
    taken[slot[n]] = true;
  }
}

void check_arguments(const KdaDecodeArgs& x) {
  const char* op = "kda_decode";
  check_sizes(op, "state", x.state, {-1, -1, -1, -1});
  const int64_t S = x.state.size(0), H = x.state.size(1), K = x.state.size(2), C = H * K;
  check_sizes(op, "state", x.state, {S, H, K, K});
  TORCH_CHECK(x.tokens >= 1, op, ": tokens: expected at least 1, got ", x.tokens);
  const int64_t N = x.slots.has_value() ? x.slots->size(0) : S, rows = N * x.tokens;
  if (x.slots.has_value()) check_index("slots", *x.slots, N, x.q.device());
  if (x.keep.has_value()) check_index("keep", *x.keep, N, x.q.device());
  if (x.slots.has_value() && x.slots->is_cpu() && !is_dataless(*x.slots)) check_slots(*x.slots, S);
  check_sizes(op, "o_norm", x.o_norm, {K});
  check_sizes(op, "dt_bias", x.dt_bias, {H, K});
  for (const auto& [name, tensor] : {std::pair("q", &x.q), std::pair("k", &x.k), std::pair("v", &x.v),
                                     std::pair("z", &x.z), std::pair("gate", &x.gate)}) {
    check_sizes(op, name, *tensor, {rows, C});
  }
  check_sizes(op, "b", x.b, {rows, H});
  check_sizes(op, "q_conv", x.q_conv, {C, -1});
  const int64_t taps = x.q_conv.size(1);
  check_sizes(op, "k_conv", x.k_conv, {C, taps}), check_sizes(op, "v_conv", x.v_conv, {C, taps});
  for (const auto& [name, tensor] :
       {std::pair("conv_q", &x.conv_q), std::pair("conv_k", &x.conv_k), std::pair("conv_v", &x.conv_v)}) {
    check_sizes(op, name, *tensor, {S, C, taps - 1});
    check_device(op, name, *tensor, x.q.device());
  }
  check_device(op, "state", x.state, x.q.device());
  TORCH_CHECK(!needs_grad(x.q, x.k, x.v, x.z, x.gate, x.b, x.q_conv, x.A_log, x.dt_bias, x.o_norm, x.state),
              "kda_decode: has no gradient; call it without grad mode");
}

Tensor checked(const KdaDecodeArgs& a) {
  check_arguments(a);
  return call("godwit::kda_decode_fwd", a);
}

// One token, the states row by row.
Tensor one_token(const KdaDecodeArgs& a) {
  const int64_t N = a.state.size(0), H = a.state.size(1), K = a.state.size(2);
  const Tensor each = at::arange(N + 1, at::kLong);  // one token a sequence
  const auto convolve = [&](const Tensor& x, const Tensor& weight, const Tensor& past) {
    const auto [y, last] = short_conv(x, weight, past, each);
    past.copy_(last);
    return y.view({N, H, K});
  };
  const Tensor q = convolve(a.q, a.q_conv, a.conv_q), k = convolve(a.k, a.k_conv, a.conv_k),
               v = convolve(a.v, a.v_conv, a.conv_v);
  Tensor state = a.state;
  const Tensor o = kda_step(q, k, v, a.z.reshape({N, H, K}), a.A_log, a.dt_bias, a.b, a.gate_bound, state);
  return rms_norm_gated(o, a.gate.reshape({N, H, K}), a.o_norm, a.norm_eps).view({N, H * K});
}

Tensor decode_meta(const KdaDecodeArgs& a) {
  return meta_like(a.q);
}

}  // namespace

// Token by token on copies of the states that are named, which are put back as they are after `keep` tokens.
Tensor kda_decode_composition(const KdaDecodeArgs& a) {
  const bool half = a.state.scalar_type() == at::kBFloat16;
  if (!a.slots.has_value() && !a.keep.has_value() && a.tokens == 1 && !half) return one_token(a);
  const int64_t N = a.q.size(0) / a.tokens;
  const Tensor slots =
      a.slots.has_value() ? a.slots->to(at::kLong) : at::arange(N, a.q.options().dtype(at::kLong));
  const Tensor have = slots.ge(0), at_row = slots.clamp_min(0);
  const Tensor keep = a.keep.has_value() ? a.keep->to(at::kLong) : at::full_like(slots, a.tokens);
  KdaDecodeArgs own = a;
  const std::pair<const Tensor*, Tensor*> states[] = {
      {&a.conv_q, &own.conv_q}, {&a.conv_k, &own.conv_k}, {&a.conv_v, &own.conv_v}, {&a.state, &own.state}};
  for (const auto& [all, mine] : states) *mine = all->index_select(0, at_row);
  if (half) own.state = own.state.to(at::kFloat);
  std::vector<Tensor> y;
  for (int64_t m = 0; m < a.tokens; ++m) {
    const auto token = [&](const Tensor& x) { return x.view({N, a.tokens, -1}).select(1, m).contiguous(); };
    own.q = token(a.q), own.k = token(a.k), own.v = token(a.v), own.z = token(a.z), own.gate = token(a.gate);
    own.b = token(a.b);
    y.push_back(one_token(own));
    const Tensor kept = at::nonzero(have.logical_and(keep.eq(m + 1))).squeeze(1);
    for (const auto& [all, mine] : states) {
      all->index_copy_(0, at_row.index_select(0, kept), mine->index_select(0, kept).to(all->scalar_type()));
    }
  }
  return at::stack(y, 1).masked_fill_(have.logical_not().view({N, 1, 1}), 0).view({N * a.tokens, -1});
}

Tensor kda_decode(const KdaDecodeArgs& args) {
  return call("godwit::kda_decode", args);
}

TORCH_LIBRARY_FRAGMENT(godwit, m) {
  for (const char* name : {"kda_decode", "kda_decode_fwd"}) {
    m.def(
        (std::string(name) +
         "(Tensor q, Tensor k, Tensor v, Tensor z, Tensor gate, Tensor b, Tensor q_conv, Tensor k_conv, "
         "Tensor "
         "v_conv, Tensor A_log, Tensor dt_bias, Tensor o_norm, float gate_bound, float norm_eps, Tensor(a!) "
         "conv_q, Tensor(b!) conv_k, Tensor(c!) conv_v, Tensor(d!) state, Tensor? slots=None, Tensor? "
         "keep=None, "
         "int tokens=1) -> Tensor")
            .c_str());
  }
}

TORCH_LIBRARY_IMPL(godwit, CompositeExplicitAutograd, m) {
  m.impl("kda_decode", kda_decode_unpacked<checked>);
  m.impl("kda_decode_fwd", kda_decode_unpacked<kda_decode_composition>);
}

TORCH_LIBRARY_IMPL(godwit, Meta, m) {
  m.impl("kda_decode_fwd", kda_decode_unpacked<decode_meta>);
}

TORCH_LIBRARY_IMPL(godwit, Autograd, m) {
  m.impl("kda_decode", kda_decode_unpacked<checked>);
}

}  // namespace godwit::ops
