// CPU registration of the RMS norms: fp32 kernels; other dtypes are converted around them, fp64 takes the
// plain composition.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "godwit/kernels/norm.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/norm_ref.h"

namespace godwit::ops {
namespace {

using std::optional;

// [rows, width] in fp32, rows dense.
Tensor as_rows(const Tensor& x) {
  Tensor rows = x.to(at::kFloat).reshape({-1, x.size(-1)});
  return rows.size(1) == 1 || rows.stride(1) == 1 ? rows : rows.contiguous();
}

struct Inputs {
  Tensor x, gate, weight;
  kernels::RmsNormInputs raw;

  Inputs(const Tensor& x_in, const optional<Tensor>& gate_in, const Tensor& weight_in, double eps)
      : x(as_rows(x_in)), weight(weight_in.to(at::kFloat).contiguous()) {
    raw = {.rows = x.size(0),
           .width = x.size(1),
           .x = x.const_data_ptr<float>(),
           .x_stride = x.stride(0),
           .weight = weight.const_data_ptr<float>(),
           .eps = static_cast<float>(eps)};
    if (!gate_in.has_value()) return;
    gate = as_rows(*gate_in);
    raw.gate = gate.const_data_ptr<float>();
    raw.gate_stride = gate.stride(0);
  }
};

Tensor forward_cpu(const Tensor& x, const optional<Tensor>& gate, const Tensor& weight, double eps) {
  const at::NoGradGuard no_grad;
  if (x.scalar_type() == at::kDouble) {
    return gate.has_value() ? ref::rms_norm_gated_ref(x, *gate, weight, eps)
                            : ref::rms_norm_ref(x, weight, eps);
  }
  const Tensor y = at::empty(x.sizes(), x.options().dtype(at::kFloat));
  if (x.numel() > 0) kernels::rms_norm_forward(Inputs(x, gate, weight, eps).raw, y.data_ptr<float>());
  return y.to(x.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor> backward_cpu(const Tensor& grad, const Tensor& x,
                                                const optional<Tensor>& gate, const Tensor& weight,
                                                double eps) {
  if (x.scalar_type() == at::kDouble) return ref::rms_norm_ref_grads(grad, x, gate, weight, eps);
  const at::NoGradGuard no_grad;
  const Tensor dx = at::empty(x.sizes(), x.options().dtype(at::kFloat));
  const Tensor dgate = gate.has_value() ? at::empty(x.sizes(), dx.options()) : Tensor();
  const Tensor dweight = at::zeros(weight.sizes(), dx.options());
  if (x.numel() > 0) {
    const Inputs in(x, gate, weight, eps);
    const Tensor dy = grad.to(at::kFloat).contiguous();
    kernels::rms_norm_backward(in.raw, dy.const_data_ptr<float>(), dx.data_ptr<float>(),
                               dgate.defined() ? dgate.data_ptr<float>() : nullptr,
                               dweight.data_ptr<float>());
  }
  return {dx.to(x.scalar_type()), dgate.defined() ? dgate.to(gate->scalar_type()) : Tensor(),
          dweight.to(weight.scalar_type())};
}

}  // namespace

TORCH_LIBRARY_IMPL(godwit, CPU, m) {
  m.impl("rms_norm_fwd", forward_cpu);
  m.impl("rms_norm_bwd", backward_cpu);
}

}  // namespace godwit::ops
