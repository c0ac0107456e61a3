// Kimi Delta Attention: schema, checks, autograd, registration (docs/kda.md). Three layers:
//   kda_chunk       what callers use: checks, then kda_chunk_fwd, under autograd with what its backward needs
//   kda_chunk_fwd, kda_chunk_bwd   one implementation a backend, `saved` is the backend's own business;
//                   CompositeExplicitAutograd is the plain composition for every backend without kernels
//   kda_step        one token a sequence, no gradient
#include <ATen/ATen.h>
#include <torch/library.h>

#include <cmath>
#include <vector>

#include "godwit/ops/autograd_util.h"
#include "godwit/ops/checks.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/kda_ref.h"
#include "godwit/ops/traced.h"

namespace godwit::ops {
namespace {

using std::optional;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using ChunkResult = std::tuple<Tensor, Tensor>;
using ForwardResult = std::tuple<Tensor, Tensor, std::vector<Tensor>>;
// Gradients of q, k, v, z, A_log, dt_bias, b, initial_state (undefined if there was none).
using BackwardResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

using ChunkSignature = ChunkResult(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                   const Tensor&, const Tensor&, double, const optional<Tensor>&,
                                   const Tensor&);
using ForwardSignature = ForwardResult(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                       const Tensor&, const Tensor&, const Tensor&, double,
                                       const optional<Tensor>&, const Tensor&, bool);
using BackwardSignature = BackwardResult(const optional<Tensor>&, const optional<Tensor>&, const Tensor&,
                                         const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                         const Tensor&, const Tensor&, double, const optional<Tensor>&,
                                         const Tensor&, at::TensorList);
using StepSignature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                             const Tensor&, const Tensor&, double, Tensor&, const optional<Tensor>&);

// Shapes, dtypes and devices that kda_chunk and kda_step share.
void check_tokens(const char* op, const KdaArgs& x) {
  TORCH_CHECK(x.q.dim() == 3, op, ": q: expected shape [T, H, K], got ", x.q.sizes());
  const int64_t tokens = x.q.size(0), heads = x.q.size(1), key = x.q.size(2);
  TORCH_CHECK(heads > 0 && key > 0, op, ": q: expected H > 0 and K > 0, got ", x.q.sizes());
  check_sizes(op, "k", x.k, {tokens, heads, key});
  check_sizes(op, "v", x.v, {tokens, heads, -1});
  check_sizes(op, "z", x.z, {tokens, heads, key});
  check_sizes(op, "A_log", x.A_log, {heads});
  check_sizes(op, "dt_bias", x.dt_bias, {heads, key});
  check_sizes(op, "b", x.b, {tokens, heads});
  TORCH_CHECK(x.v.size(2) > 0, op, ": v: expected V > 0, got ", x.v.sizes());
  check_floating(op, "v", x.v);
  check_dtype(op, "q", x.q, x.v.scalar_type());
  check_dtype(op, "k", x.k, x.v.scalar_type());
  check_floating(op, "z", x.z);
  check_floating(op, "b", x.b);
  const auto parameters = x.v.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  check_dtype(op, "A_log", x.A_log, parameters);
  check_dtype(op, "dt_bias", x.dt_bias, parameters);
  for (const auto& [name, tensor] :
       {std::pair("k", &x.k), std::pair("v", &x.v), std::pair("z", &x.z), std::pair("A_log", &x.A_log),
        std::pair("dt_bias", &x.dt_bias), std::pair("b", &x.b)}) {
    check_device(op, name, *tensor, x.q.device());
  }
  TORCH_CHECK(std::isfinite(x.gate_bound), op, ": gate_bound: expected a finite number, got ", x.gate_bound);
}

// fp32, or bf16 beside inputs that are not fp64.
void check_state(const char* op, const char* name, const KdaArgs& x, const Tensor& state, int64_t sequences) {
  check_sizes(op, name, state, {sequences, x.q.size(1), x.q.size(2), x.v.size(2)});
  const bool half = state.scalar_type() == at::kBFloat16 && x.v.scalar_type() != at::kDouble;
  if (!half) check_dtype(op, name, state, x.v.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  check_device(op, name, state, x.q.device());
}

void check_chunk(const KdaArgs& x) {
  if (is_dataless(x.q)) return;
  check_tokens("kda_chunk", x);
  const int64_t n = check_cu_seqlens("kda_chunk", "cu_seqlens", x.cu_seqlens, x.q.size(0));
  if (x.initial_state.has_value()) check_state("kda_chunk", "initial_state", x, *x.initial_state, n);
}

ForwardResult call_forward(const KdaArgs& x, bool save) {
  static const auto op = typed_handle<ForwardSignature>("godwit::kda_chunk_fwd");
  return op.call(x.q, x.k, x.v, x.z, x.A_log, x.dt_bias, x.b, x.gate_bound, x.initial_state, x.cu_seqlens,
                 save);
}

BackwardResult call_backward(const optional<Tensor>& grad_o, const optional<Tensor>& grad_state,
                             const KdaArgs& x, at::TensorList saved) {
  static const auto op = typed_handle<BackwardSignature>("godwit::kda_chunk_bwd");
  return op.call(grad_o, grad_state, x.q, x.k, x.v, x.z, x.A_log, x.dt_bias, x.b, x.gate_bound,
                 x.initial_state, x.cu_seqlens, saved);
}

class KdaChunk : public torch::autograd::Function<KdaChunk> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                               const Tensor& z, const Tensor& A_log, const Tensor& dt_bias, const Tensor& b,
                               double gate_bound, const optional<Tensor>& initial_state,
                               const Tensor& cu_seqlens) {
    auto [o, final_state, saved] =
        call_forward({q, k, v, z, A_log, dt_bias, b, gate_bound, initial_state, cu_seqlens},
                     /*save=*/!is_observed(q));
    variable_list keep = {q, k, v, z, A_log, dt_bias, b, or_undefined(initial_state), cu_seqlens};
    keep.insert(keep.end(), saved.begin(), saved.end());
    ctx->save_for_backward(keep);
    ctx->saved_data["gate_bound"] = gate_bound;
    ctx->set_materialize_grads(false);
    return {o, final_state};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list keep = ctx->get_saved_variables();
    variable_list out(10);  // one for each argument of forward; gate_bound and cu_seqlens have none
    if (!grads[0].defined() && !grads[1].defined()) return out;
    {
      const at::NoGradGuard no_grad;
      const double gate_bound = ctx->saved_data["gate_bound"].toDouble();
      const KdaArgs x{keep[0], keep[1], keep[2],    keep[3],          keep[4],
                      keep[5], keep[6], gate_bound, or_none(keep[7]), keep[8]};
      const at::TensorList saved = at::TensorList(keep).slice(9);
      std::tie(out[0], out[1], out[2], out[3], out[4], out[5], out[6], out[8]) =
          call_backward(or_none(grads[0]), or_none(grads[1]), x, saved);
    }
    return once_differentiable("kda_chunk", keep[2], std::move(out));
  }
};

ChunkResult chunk_checked(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& z,
                          const Tensor& A_log, const Tensor& dt_bias, const Tensor& b, double gate_bound,
                          const optional<Tensor>& initial_state, const Tensor& cu_seqlens) {
  const KdaArgs x{q, k, v, z, A_log, dt_bias, b, gate_bound, initial_state, cu_seqlens};
  check_chunk(x);
  if (initial_state.has_value() && initial_state->scalar_type() == at::kBFloat16) {
    auto [o, final_state] =
        kda_chunk(q, k, v, z, A_log, dt_bias, b, gate_bound, initial_state->to(at::kFloat), cu_seqlens);
    return {o, final_state.to(at::kBFloat16)};
  }
  if (needs_grad(q, k, v, z, A_log, dt_bias, b, initial_state)) {
    const auto out = KdaChunk::apply(q, k, v, z, A_log, dt_bias, b, gate_bound, initial_state, cu_seqlens);
    return {out[0], out[1]};
  }
  auto [o, final_state, saved] = call_forward(x, /*save=*/false);
  return {o, final_state};
}

ForwardResult forward_meta(const Tensor& q, const Tensor&, const Tensor& v, const Tensor&, const Tensor&,
                           const Tensor&, const Tensor&, double, const optional<Tensor>&,
                           const Tensor& cu_seqlens, bool save) {
  TORCH_CHECK(!save, "kda_chunk_fwd: what the forward keeps has no shape before it runs");
  const auto state_type = v.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return {
      meta_like(v),
      meta_tensor({cu_seqlens.sym_size(0) - 1, q.sym_size(1), q.sym_size(2), v.sym_size(2)}, v, state_type),
      {}};
}

BackwardResult backward_meta(const optional<Tensor>&, const optional<Tensor>&, const Tensor& q,
                             const Tensor& k, const Tensor& v, const Tensor& z, const Tensor& A_log,
                             const Tensor& dt_bias, const Tensor& b, double,
                             const optional<Tensor>& initial_state, const Tensor&, at::TensorList) {
  return {meta_like(q),     meta_like(k),
          meta_like(v),     meta_like(z),
          meta_like(A_log), meta_like(dt_bias),
          meta_like(b),     initial_state.has_value() ? meta_like(*initial_state) : Tensor()};
}

ForwardResult forward_composition(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& z,
                                  const Tensor& A_log, const Tensor& dt_bias, const Tensor& b,
                                  double gate_bound, const optional<Tensor>& initial_state,
                                  const Tensor& cu_seqlens, bool /*save*/) {
  const at::NoGradGuard no_grad;
  auto [o, final_state] =
      ref::kda_chunk_ref({q, k, v, z, A_log, dt_bias, b, gate_bound, initial_state, cu_seqlens});
  return {o, final_state, {}};
}

BackwardResult backward_composition(const optional<Tensor>& grad_o, const optional<Tensor>& grad_state,
                                    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& z,
                                    const Tensor& A_log, const Tensor& dt_bias, const Tensor& b,
                                    double gate_bound, const optional<Tensor>& initial_state,
                                    const Tensor& cu_seqlens, at::TensorList /*saved*/) {
  const auto grads = ref::kda_chunk_ref_grads(
      grad_o, grad_state, {q, k, v, z, A_log, dt_bias, b, gate_bound, initial_state, cu_seqlens});
  return {grads[0], grads[1], grads[2], grads[3], grads[4], grads[5], grads[6], grads[7]};
}

Tensor step_fwd_composition(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& z,
                            const Tensor& A_log, const Tensor& dt_bias, const Tensor& b, double gate_bound,
                            Tensor& state, const optional<Tensor>& slots) {
  const at::NoGradGuard no_grad;
  return ref::kda_step_ref({q, k, v, z, A_log, dt_bias, b, gate_bound, std::nullopt, Tensor()}, state, slots);
}

// int64 [N] on the CPU: each below `states`, and no state for two rows.
void check_slots(const Tensor& slots, int64_t rows, int64_t states) {
  check_sizes("kda_step", "slots", slots, {rows});
  check_dtype("kda_step", "slots", slots, at::kLong);
  check_device("kda_step", "slots", slots, at::kCPU);
  if (is_dataless(slots)) return;
  const Tensor dense = slots.contiguous();
  const auto* slot = dense.const_data_ptr<int64_t>();
  std::vector<bool> taken(states);
  for (int64_t n = 0; n < rows; ++n) {
    if (slot[n] < 0) continue;
    TORCH_CHECK(slot[n] < states, "kda_step: slots: expected slots below ", states, ", got ", slot[n], " at ",
                n);
    TORCH_CHECK(!taken[slot[n]], "kda_step: slots: expected distinct slots, got ", slot[n], " again at ", n);
    taken[slot[n]] = true;
  }
}

Tensor step_checked(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& z, const Tensor& A_log,
                    const Tensor& dt_bias, const Tensor& b, double gate_bound, Tensor& state,
                    const optional<Tensor>& slots) {
  const KdaArgs x{q, k, v, z, A_log, dt_bias, b, gate_bound, std::nullopt, Tensor()};
  check_tokens("kda_step", x);
  check_state("kda_step", "state", x, state, slots.has_value() ? -1 : q.size(0));
  if (slots.has_value()) check_slots(*slots, q.size(0), state.size(0));
  TORCH_CHECK(!needs_grad(q, k, v, z, A_log, dt_bias, b, state),
              "kda_step: has no gradient; call it without grad mode, or train with kda_chunk");
  static const auto op = typed_handle<StepSignature>("godwit::kda_step_fwd");
  return op.call(q, k, v, z, A_log, dt_bias, b, gate_bound, state, slots);
}

Tensor step_meta(const Tensor&, const Tensor&, const Tensor& v, const Tensor&, const Tensor&, const Tensor&,
                 const Tensor&, double, Tensor&, const optional<Tensor>&) {
  return at::empty(v.sizes(), v.options());
}

}  // namespace

std::tuple<Tensor, Tensor> kda_chunk(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& z,
                                     const Tensor& A_log, const Tensor& dt_bias, const Tensor& b,
                                     double gate_bound, const std::optional<Tensor>& initial_state,
                                     const Tensor& cu_seqlens) {
  static const auto op = typed_handle<ChunkSignature>("godwit::kda_chunk");
  return op.call(q, k, v, z, A_log, dt_bias, b, gate_bound, initial_state, cu_seqlens);
}

Tensor kda_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& z, const Tensor& A_log,
                const Tensor& dt_bias, const Tensor& b, double gate_bound, Tensor& state,
                const std::optional<Tensor>& slots) {
  static const auto op = typed_handle<StepSignature>("godwit::kda_step");
  return op.call(q, k, v, z, A_log, dt_bias, b, gate_bound, state, slots);
}

TORCH_LIBRARY_FRAGMENT(godwit, m) {
  m.def(
      "kda_chunk(Tensor q, Tensor k, Tensor v, Tensor z, Tensor A_log, Tensor dt_bias, Tensor b, float "
      "gate_bound, Tensor? initial_state, Tensor cu_seqlens) -> (Tensor, Tensor)");
  m.def(
      "kda_chunk_fwd(Tensor q, Tensor k, Tensor v, Tensor z, Tensor A_log, Tensor dt_bias, Tensor b, float "
      "gate_bound, Tensor? initial_state, Tensor cu_seqlens, bool save) -> (Tensor, Tensor, Tensor[])");
  m.def(
      "kda_chunk_bwd(Tensor? grad_o, Tensor? grad_final_state, Tensor q, Tensor k, Tensor v, Tensor z, "
      "Tensor "
      "A_log, Tensor dt_bias, Tensor b, float gate_bound, Tensor? initial_state, Tensor cu_seqlens, Tensor[] "
      "saved) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "kda_step(Tensor q, Tensor k, Tensor v, Tensor z, Tensor A_log, Tensor dt_bias, Tensor b, float "
      "gate_bound, Tensor(a!) state, Tensor? slots=None) -> Tensor");
  m.def(
      "kda_step_fwd(Tensor q, Tensor k, Tensor v, Tensor z, Tensor A_log, Tensor dt_bias, Tensor b, float "
      "gate_bound, Tensor(a!) state, Tensor? slots=None) -> Tensor");
}

TORCH_LIBRARY_IMPL(godwit, CompositeExplicitAutograd, m) {
  m.impl("kda_chunk", chunk_checked);
  m.impl("kda_chunk_fwd", forward_composition);
  m.impl("kda_chunk_bwd", backward_composition);
  m.impl("kda_step", step_checked);
  m.impl("kda_step_fwd", step_fwd_composition);
}

TORCH_LIBRARY_IMPL(godwit, Autograd, m) {
  m.impl("kda_chunk", chunk_checked);
  m.impl("kda_step", step_checked);
}

TORCH_LIBRARY_IMPL(godwit, Meta, m) {
  m.impl("kda_chunk_fwd", forward_meta);
  m.impl("kda_chunk_bwd", backward_meta);
  m.impl("kda_step_fwd", step_meta);
}

}  // namespace godwit::ops
