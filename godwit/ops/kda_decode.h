// Shared by the registrations of kda_decode: its schema as a C++ signature, and the plain composition.
#pragma once

#include <ATen/core/Tensor.h>

#include "godwit/ops/ops.h"

namespace godwit::ops {

// q, k, v, z, gate, b, q_conv, k_conv, v_conv, A_log, dt_bias, o_norm, gate_bound, norm_eps, conv_q, conv_k,
// conv_v, state, slots, keep, tokens.
using KdaDecodeSignature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                  const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                  const Tensor&, const Tensor&, double, double, Tensor&, Tensor&, Tensor&,
                                  Tensor&, const std::optional<Tensor>&, const std::optional<Tensor>&,
                                  int64_t);

Tensor kda_decode_composition(const KdaDecodeArgs& args);

// Wraps a function of KdaDecodeArgs as the schema's kernel.
template <Tensor (*kRun)(const KdaDecodeArgs&)>
Tensor kda_decode_unpacked(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& z,
                           const Tensor& gate, const Tensor& b, const Tensor& q_conv, const Tensor& k_conv,
                           const Tensor& v_conv, const Tensor& A_log, const Tensor& dt_bias,
                           const Tensor& o_norm, double gate_bound, double norm_eps, Tensor& conv_q,
                           Tensor& conv_k, Tensor& conv_v, Tensor& state, const std::optional<Tensor>& slots,
                           const std::optional<Tensor>& keep, int64_t tokens) {
  return kRun({q,      k,          v,        z,      gate,   b,      q_conv, k_conv, v_conv, A_log, dt_bias,
               o_norm, gate_bound, norm_eps, conv_q, conv_k, conv_v, state,  slots,  keep,   tokens});
}

}  // namespace godwit::ops
