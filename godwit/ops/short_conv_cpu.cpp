// CPU registration of the short convolution: fp32 kernels; other dtypes are converted around them, fp64 takes
// the plain composition.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "godwit/kernels/short_conv.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/short_conv_ref.h"

namespace godwit::ops {
namespace {

using std::optional;

struct Inputs {
  Tensor x, weight, state;
  kernels::ShortConvInputs raw;

  Inputs(const Tensor& x_in, const Tensor& weight_in, const optional<Tensor>& state_in, const Tensor& cu)
      : x(x_in.to(at::kFloat)), weight(weight_in.contiguous()) {
    if (x.size(1) != 1 && x.stride(1) != 1) x = x.contiguous();
    raw = {.channels = x.size(1),
           .taps = weight.size(1),
           .sequences = cu.numel() - 1,
           .cu_seqlens = cu.const_data_ptr<int64_t>(),
           .x = x.const_data_ptr<float>(),
           .x_stride = x.stride(0),
           .weight = weight.const_data_ptr<float>()};
    if (!state_in.has_value()) return;
    state = state_in->to(at::kFloat).contiguous();
    raw.state = state.const_data_ptr<float>();
  }
};

std::tuple<Tensor, Tensor> forward_cpu(const Tensor& x, const Tensor& weight,
                                       const optional<Tensor>& initial_state, const Tensor& cu_seqlens) {
  const at::NoGradGuard no_grad;
  if (x.scalar_type() == at::kDouble) return ref::short_conv_ref(x, weight, initial_state, cu_seqlens);
  const Inputs in(x, weight, initial_state, cu_seqlens);
  const auto fp32 = x.options().dtype(at::kFloat);
  const Tensor y = at::empty(x.sizes(), fp32);
  const Tensor final_state = at::empty({cu_seqlens.numel() - 1, x.size(1), weight.size(1) - 1}, fp32);
  kernels::short_conv_forward(in.raw, y.data_ptr<float>(), final_state.data_ptr<float>());
  const auto state_type = initial_state.has_value() ? initial_state->scalar_type() : x.scalar_type();
  return {y.to(x.scalar_type()), final_state.to(state_type)};
}

std::tuple<Tensor, Tensor, Tensor> backward_cpu(const optional<Tensor>& grad_y,
                                                const optional<Tensor>& grad_final_state, const Tensor& x,
                                                const Tensor& weight, const optional<Tensor>& initial_state,
                                                const Tensor& cu_seqlens) {
  if (x.scalar_type() == at::kDouble) {
    return ref::short_conv_ref_grads(grad_y, grad_final_state, x, weight, initial_state, cu_seqlens);
  }
  const at::NoGradGuard no_grad;
  const Inputs in(x, weight, initial_state, cu_seqlens);
  const auto like = [](const Tensor& t) { return at::empty(t.sizes(), t.options().dtype(at::kFloat)); };
  const auto dense = [](const optional<Tensor>& t) {
    return t.has_value() ? t->to(at::kFloat).contiguous() : Tensor();
  };
  const Tensor dy = dense(grad_y), d_final = dense(grad_final_state);
  const Tensor dx = like(x), dweight = like(weight);
  const Tensor dstate = initial_state.has_value() ? like(*initial_state) : Tensor();
  kernels::short_conv_backward(
      in.raw, {.grad_y = dy.defined() ? dy.const_data_ptr<float>() : nullptr,
               .grad_final_state = d_final.defined() ? d_final.const_data_ptr<float>() : nullptr,
               .dx = dx.data_ptr<float>(),
               .dweight = dweight.data_ptr<float>(),
               .dstate = dstate.defined() ? dstate.data_ptr<float>() : nullptr});
  return {dx.to(x.scalar_type()), dweight,
          dstate.defined() ? dstate.to(initial_state->scalar_type()) : Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(godwit, CPU, m) {
  m.impl("short_conv_fwd", forward_cpu);
  m.impl("short_conv_bwd", backward_cpu);
}

}  // namespace godwit::ops
