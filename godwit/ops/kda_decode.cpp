// One decode step of a KDA layer (docs/kda.md): schema, and the composition of the ops that a fused kernel
// replaces. CompositeExplicitAutograd serves every backend without such a kernel.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <string>

#include "godwit/ops/autograd_util.h"
#include "godwit/ops/checks.h"
#include "godwit/ops/kda_decode.h"
#include "godwit/ops/ops.h"

namespace godwit::ops {
namespace {

// The states are passed as mutable references by the schema; a Tensor is a handle, so copies serve.
Tensor call(const char* name, const KdaDecodeArgs& a) {
  const auto op = typed_handle<KdaDecodeSignature>(name);
  Tensor conv_q = a.conv_q, conv_k = a.conv_k, conv_v = a.conv_v, state = a.state;
  return op.call(a.q, a.k, a.v, a.z, a.gate, a.b, a.q_conv, a.k_conv, a.v_conv, a.A_log, a.dt_bias, a.o_norm,
                 a.gate_bound, a.norm_eps, conv_q, conv_k, conv_v, state);
}

void check_arguments(const KdaDecodeArgs& x) {
  const char* op = "kda_decode";
  check_sizes(op, "state", x.state, {-1, -1, -1, -1});
  const int64_t N = x.state.size(0), H = x.state.size(1), K = x.state.size(2), C = H * K;
  check_sizes(op, "state", x.state, {N, H, K, K});
  check_sizes(op, "o_norm", x.o_norm, {K});
  check_sizes(op, "dt_bias", x.dt_bias, {H, K});
  check_sizes(op, "q", x.q, {N, C}), check_sizes(op, "k", x.k, {N, C}), check_sizes(op, "v", x.v, {N, C});
  check_sizes(op, "z", x.z, {N, C}), check_sizes(op, "gate", x.gate, {N, C}),
      check_sizes(op, "b", x.b, {N, H});
  check_sizes(op, "q_conv", x.q_conv, {C, -1});
  const int64_t taps = x.q_conv.size(1);
  check_sizes(op, "k_conv", x.k_conv, {C, taps}), check_sizes(op, "v_conv", x.v_conv, {C, taps});
  for (const auto& [name, tensor] :
       {std::pair("conv_q", &x.conv_q), std::pair("conv_k", &x.conv_k), std::pair("conv_v", &x.conv_v)}) {
    check_sizes(op, name, *tensor, {N, C, taps - 1});
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

}  // namespace

Tensor kda_decode_composition(const KdaDecodeArgs& a) {
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

static Tensor kda_decode_meta(const KdaDecodeArgs& a) {
  return at::empty(a.q.sizes(), a.q.options());
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
         "conv_q, Tensor(b!) conv_k, Tensor(c!) conv_v, Tensor(d!) state) -> Tensor")
            .c_str());
  }
}

TORCH_LIBRARY_IMPL(godwit, CompositeExplicitAutograd, m) {
  m.impl("kda_decode", kda_decode_unpacked<checked>);
  m.impl("kda_decode_fwd", kda_decode_unpacked<kda_decode_composition>);
}

TORCH_LIBRARY_IMPL(godwit, Meta, m) {
  m.impl("kda_decode_fwd", kda_decode_unpacked<kda_decode_meta>);
}

TORCH_LIBRARY_IMPL(godwit, Autograd, m) {
  m.impl("kda_decode", kda_decode_unpacked<checked>);
}

}  // namespace godwit::ops
