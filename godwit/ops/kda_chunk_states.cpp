// kda_chunk_states: kda_chunk for inference, which also gives the states at requested boundaries (prefix
// checkpoints): schema, checks, and the composition that serves every backend without a kernel for it.
#include "godwit/ops/kda_chunk_states.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <string>

#include "godwit/ops/autograd_util.h"
#include "godwit/ops/checks.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/traced.h"

namespace godwit::ops {
namespace {

constexpr const char* kOp = "kda_chunk_states";

KdaChunkStatesResult call_forward(const KdaArgs& x, const Tensor& at) {
  static const auto op = typed_handle<KdaChunkStatesSignature>("godwit::kda_chunk_states_fwd");
  return op.call(x.q, x.k, x.v, x.z, x.A_log, x.dt_bias, x.b, x.gate_bound, x.initial_state, x.cu_seqlens,
                 at);
}

KdaChunkStatesResult checked(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& z,
                             const Tensor& A_log, const Tensor& dt_bias, const Tensor& b, double gate_bound,
                             const std::optional<Tensor>& initial_state, const Tensor& cu_seqlens,
                             const Tensor& at) {
  TORCH_CHECK(!needs_grad(q, k, v, z, A_log, dt_bias, b, initial_state), kOp,
              ": has no gradient; call it without grad mode, or train with kda_chunk");
  check_sizes(kOp, "at", at, {-1});
  check_dtype(kOp, "at", at, at::kLong);
  check_device(kOp, "at", at, at::kCPU);
  if (!is_dataless(q)) {
    check_cu_seqlens(kOp, "cu_seqlens", cu_seqlens, q.size(0));
    TORCH_CHECK(at.is_contiguous(), kOp, ": at: expected a contiguous tensor");
    const auto* place = at.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < at.numel(); ++i) {
      const int64_t least = i > 0 ? place[i - 1] + 1 : 1;
      TORCH_CHECK(place[i] >= least && place[i] <= q.size(0), kOp, ": at: expected ", least, " to ",
                  q.size(0), " at index ", i, ", got ", place[i]);
    }
  }
  const KdaArgs x{q, k, v, z, A_log, dt_bias, b, gate_bound, initial_state, cu_seqlens};
  if (!initial_state.has_value() || initial_state->scalar_type() != at::kBFloat16) return call_forward(x, at);
  KdaArgs full = x;
  full.initial_state = initial_state->to(at::kFloat);
  const auto [o, final_state, states] = call_forward(full, at);
  return {o, final_state.to(at::kBFloat16), states.to(at::kBFloat16)};
}

KdaChunkStatesResult forward_composition(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& z,
                                         const Tensor& A_log, const Tensor& dt_bias, const Tensor& b,
                                         double gate_bound, const std::optional<Tensor>& initial_state,
                                         const Tensor& cu_seqlens, const Tensor& at) {
  return kda_chunk_states_composition({q, k, v, z, A_log, dt_bias, b, gate_bound, initial_state, cu_seqlens},
                                      at);
}

KdaChunkStatesResult forward_meta(const Tensor& q, const Tensor&, const Tensor& v, const Tensor&,
                                  const Tensor&, const Tensor&, const Tensor&, double,
                                  const std::optional<Tensor>&, const Tensor& cu_seqlens, const Tensor& at) {
  const auto type = v.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto states = [&](const c10::SymInt& count) {
    return meta_tensor({count, q.sym_size(1), q.sym_size(2), v.sym_size(2)}, v, type);
  };
  return {meta_like(v), states(cu_seqlens.sym_size(0) - 1), states(at.sym_size(0))};
}

}  // namespace

KdaChunkStatesResult kda_chunk_states_composition(const KdaArgs& x, const Tensor& at) {
  const at::NoGradGuard no_grad;
  const auto type = x.v.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const int64_t N = x.cu_seqlens.numel() - 1, H = x.q.size(1), K = x.q.size(2), V = x.v.size(2);
  const auto* cu = x.cu_seqlens.const_data_ptr<int64_t>();
  const auto* place = at.const_data_ptr<int64_t>();
  const Tensor o = at::empty_like(x.v);
  const Tensor final_state = x.initial_state.has_value() ? x.initial_state->to(type).clone()
                                                         : at::zeros({N, H, K, V}, x.v.options().dtype(type));
  const Tensor states = at::empty({at.numel(), H, K, V}, final_state.options());
  int64_t next = 0;
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t begin = cu[n]; begin < cu[n + 1];) {
      const bool stop = next < at.numel() && place[next] <= cu[n + 1];
      const int64_t end = stop ? place[next] : cu[n + 1];
      const auto rows = [&](const Tensor& t) { return t.narrow(0, begin, end - begin); };
      const auto [part, state] =
          kda_chunk(rows(x.q), rows(x.k), rows(x.v), rows(x.z), x.A_log, x.dt_bias, rows(x.b), x.gate_bound,
                    final_state.narrow(0, n, 1), at::tensor({int64_t{0}, end - begin}, at::kLong));
      rows(o).copy_(part);
      final_state[n].copy_(state[0]);
      if (stop) states[next++].copy_(state[0]);
      begin = end;
    }
  }
  return {o, final_state, states};
}

std::tuple<Tensor, Tensor, Tensor> kda_chunk_states(const Tensor& q, const Tensor& k, const Tensor& v,
                                                    const Tensor& z, const Tensor& A_log,
                                                    const Tensor& dt_bias, const Tensor& b, double gate_bound,
                                                    const std::optional<Tensor>& initial_state,
                                                    const Tensor& cu_seqlens, const Tensor& at) {
  static const auto op = typed_handle<KdaChunkStatesSignature>("godwit::kda_chunk_states");
  return op.call(q, k, v, z, A_log, dt_bias, b, gate_bound, initial_state, cu_seqlens, at);
}

TORCH_LIBRARY_FRAGMENT(godwit, m) {
  for (const char* name : {"kda_chunk_states", "kda_chunk_states_fwd"}) {
    m.def((std::string(name) +
           "(Tensor q, Tensor k, Tensor v, Tensor z, Tensor A_log, Tensor dt_bias, Tensor b, float "
           "gate_bound, Tensor? initial_state, Tensor cu_seqlens, Tensor at) -> (Tensor o, Tensor "
           "final_state, Tensor states)")
              .c_str());
  }
}
TORCH_LIBRARY_IMPL(godwit, CompositeExplicitAutograd, m) {
  m.impl("kda_chunk_states", checked);
  m.impl("kda_chunk_states_fwd", forward_composition);
}
TORCH_LIBRARY_IMPL(godwit, Autograd, m) {
  m.impl("kda_chunk_states", checked);
}
TORCH_LIBRARY_IMPL(godwit, Meta, m) {
  m.impl("kda_chunk_states_fwd", forward_meta);
}

}  // namespace godwit::ops
