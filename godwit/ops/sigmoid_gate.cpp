// sigmoid_gate: checks, autograd and dispatch. On the CPU an element's bits do not depend on where it stands,
// which ATen's sigmoid does not promise (its last few elements take another path).
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "godwit/kernels/glu.h"
#include "godwit/ops/arguments.h"
#include "godwit/ops/dispatch.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/glu_ref.h"

namespace godwit::ops {
namespace {

void check_arguments(const Tensor& x, const Tensor& g) {
  check_float({"sigmoid_gate", "x", x}, x.dim());
  check_like({"sigmoid_gate", "g", g}, {"sigmoid_gate", "x", x});
  check_shape({"sigmoid_gate", "g", g}, x.sizes());
}

Tensor fwd_cpu(const Tensor& x, const Tensor& g) {
  const Tensor value = as_float(x), gate = as_float(g);
  Tensor out = at::empty(value.sizes(), value.options());
  kernels::sigmoid_gate_fwd(value.numel(), value.const_data_ptr<float>(), gate.const_data_ptr<float>(),
                            out.mutable_data_ptr<float>());
  return out.to(x.scalar_type());
}

std::tuple<Tensor, Tensor> bwd_cpu(const Tensor& d_out, const Tensor& x, const Tensor& g) {
  const Tensor d = as_float(d_out), value = as_float(x), gate = as_float(g);
  Tensor d_x = at::empty(value.sizes(), value.options()), d_g = at::empty(value.sizes(), value.options());
  kernels::sigmoid_gate_bwd(value.numel(), d.const_data_ptr<float>(), value.const_data_ptr<float>(),
                            gate.const_data_ptr<float>(), d_x.mutable_data_ptr<float>(),
                            d_g.mutable_data_ptr<float>());
  return {d_x.to(x.scalar_type()), d_g.to(g.scalar_type())};
}

Tensor fwd_meta(const Tensor& x, const Tensor& /*g*/) {
  return at::empty(x.sizes(), x.options());
}

std::tuple<Tensor, Tensor> bwd_meta(const Tensor& /*d_out*/, const Tensor& x, const Tensor& g) {
  return {at::empty(x.sizes(), x.options()), at::empty(g.sizes(), g.options())};
}

using Fwd = decltype(fwd_cpu);
using Bwd = decltype(bwd_cpu);

class SigmoidGate : public torch::autograd::Function<SigmoidGate> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, const Tensor& g) {
    const at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = typed_op<Fwd>("godwit::sigmoid_gate_fwd");
    ctx->save_for_backward({x, g});
    return op.call(x, g);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    static const auto op = typed_op<Bwd>("godwit::sigmoid_gate_bwd");
    const auto saved = ctx->get_saved_variables();
    const auto [d_x, d_g] = op.call(grads[0], saved[0], saved[1]);
    return {d_x, d_g};
  }
};

Tensor sigmoid_gate_composite(const Tensor& x, const Tensor& g) {
  check_arguments(x, g);
  static const auto op = typed_op<Fwd>("godwit::sigmoid_gate_fwd");
  if (!has_kernel(op, x)) return ref::sigmoid_gate(x, g);
  if (needs_grad(x, g)) return SigmoidGate::apply(x, g);
  return op.call(x, g);
}

TORCH_LIBRARY_FRAGMENT(godwit, m) {
  m.def("sigmoid_gate(Tensor x, Tensor g) -> Tensor");
  m.def("sigmoid_gate_fwd(Tensor x, Tensor g) -> Tensor");
  m.def("sigmoid_gate_bwd(Tensor d_out, Tensor x, Tensor g) -> (Tensor d_x, Tensor d_g)");
}
TORCH_LIBRARY_IMPL(godwit, CompositeImplicitAutograd, m) {
  m.impl("sigmoid_gate", sigmoid_gate_composite);
}
TORCH_LIBRARY_IMPL(godwit, CPU, m) {
  m.impl("sigmoid_gate_fwd", fwd_cpu);
  m.impl("sigmoid_gate_bwd", bwd_cpu);
}
TORCH_LIBRARY_IMPL(godwit, Meta, m) {
  m.impl("sigmoid_gate_fwd", fwd_meta);
  m.impl("sigmoid_gate_bwd", bwd_meta);
}

}  // namespace

Tensor sigmoid_gate(const Tensor& x, const Tensor& g) {
  static const auto op = typed_op<decltype(sigmoid_gate_composite)>("godwit::sigmoid_gate");
  return op.call(x, g);
}

}  // namespace godwit::ops
