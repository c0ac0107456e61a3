// CPU registration of attention's kernels: fp32, widths that are multiples of 16 (checked by the op).
#include <ATen/ATen.h>
#include <torch/library.h>

#include "godwit/kernels/attention.h"
#include "godwit/ops/ops.h"

namespace godwit::ops {
namespace {

// The kernels' view of the arguments, and the tensors that keep it alive.
struct Inputs {
  Tensor q, k, v, cu_q, cu_k;

  // Tokens and heads may lie anywhere, a head's entries together.
  static Tensor rows(const Tensor& x) { return x.stride(2) == 1 ? x : x.contiguous(); }

  Inputs(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const Tensor& cu_q_in,
         const Tensor& cu_k_in)
      : q(rows(q_in)), k(rows(k_in)), v(rows(v_in)), cu_q(cu_q_in.contiguous()), cu_k(cu_k_in.contiguous()) {}

  [[nodiscard]] kernels::AttentionInputs view(double scale, int64_t window) const {
    const auto rows_of = [](const Tensor& x) {
      return kernels::AttentionRows<const float>{x.const_data_ptr<float>(), x.stride(0), x.stride(1)};
    };
    return {.heads = q.size(1),
            .key = q.size(2),
            .value = v.size(2),
            .q = rows_of(q),
            .k = rows_of(k),
            .v = rows_of(v),
            .sequences = cu_q.numel() - 1,
            .cu_q = cu_q.const_data_ptr<int64_t>(),
            .cu_k = cu_k.const_data_ptr<int64_t>(),
            .scale = static_cast<float>(scale),
            .window = window};
  }
};

std::tuple<Tensor, Tensor> forward_cpu(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_q,
                                       const Tensor& cu_k, double scale, int64_t window, bool save) {
  const Inputs in(q, k, v, cu_q, cu_k);
  const Tensor o = at::empty({q.size(0), q.size(1), v.size(2)}, q.options());
  const Tensor lse = at::empty({save ? q.size(0) : 0, q.size(1)}, q.options());
  kernels::attention_forward({.in = in.view(scale, window),
                              .o = o.mutable_data_ptr<float>(),
                              .lse = save ? lse.mutable_data_ptr<float>() : nullptr});
  return {o, lse};
}

std::tuple<Tensor, Tensor, Tensor> backward_cpu(const Tensor& grad_o, const Tensor& q, const Tensor& k,
                                                const Tensor& v, const Tensor& cu_q, const Tensor& cu_k,
                                                const Tensor& o, const Tensor& lse, double scale,
                                                int64_t window) {
  const Inputs in(q, k, v, cu_q, cu_k);
  const Tensor grad = grad_o.contiguous(), out = o.contiguous(), sums = lse.contiguous();
  const auto like = [](const Tensor& x) { return at::empty(x.sizes(), x.options()); };
  const Tensor dq = like(q), dk = like(k), dv = like(v);
  kernels::attention_backward({.in = in.view(scale, window),
                               .o = out.const_data_ptr<float>(),
                               .lse = sums.const_data_ptr<float>(),
                               .grad_o = grad.const_data_ptr<float>(),
                               .dq = dq.mutable_data_ptr<float>(),
                               .dk = dk.mutable_data_ptr<float>(),
                               .dv = dv.mutable_data_ptr<float>()});
  return {dq, dk, dv};
}

}  // namespace

TORCH_LIBRARY_IMPL(godwit, CPU, m) {
  m.impl("attention_fwd", forward_cpu);
  m.impl("attention_bwd", backward_cpu);
}

}  // namespace godwit::ops
