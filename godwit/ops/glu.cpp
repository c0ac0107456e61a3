// glu: checks, autograd and dispatch.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "godwit/kernels/glu.h"
#include "godwit/ops/arguments.h"
#include "godwit/ops/dispatch.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/glu_ref.h"
#include "godwit/ops/traced.h"

namespace godwit::ops {
namespace {

void check_arguments(const Tensor& g, const Tensor& u, double beta_gate, double beta_up) {
  if (is_dataless(g)) return;
  check_float({"glu", "g", g}, g.dim());
  check_like({"glu", "u", u}, {"glu", "g", g});
  check_shape({"glu", "u", u}, g.sizes());
  TORCH_CHECK(beta_gate >= 0 && beta_up >= 0, "glu: beta_gate, beta_up: expected 0 (off) or positive, got ",
              beta_gate, ", ", beta_up);
}

kernels::GluForm form_of(double beta_gate, double beta_up) {
  return {.beta_gate = static_cast<float>(beta_gate), .beta_up = static_cast<float>(beta_up)};
}

Tensor fwd_cpu(const Tensor& g, const Tensor& u, double beta_gate, double beta_up) {
  const Tensor gate = as_float(g), up = as_float(u);
  Tensor out = at::empty(gate.sizes(), gate.options());
  kernels::glu_fwd(gate.numel(), gate.const_data_ptr<float>(), up.const_data_ptr<float>(),
                   form_of(beta_gate, beta_up), out.mutable_data_ptr<float>());
  return out.to(g.scalar_type());
}

std::tuple<Tensor, Tensor> bwd_cpu(const Tensor& d_out, const Tensor& g, const Tensor& u, double beta_gate,
                                   double beta_up) {
  const Tensor d = as_float(d_out), gate = as_float(g), up = as_float(u);
  Tensor d_g = at::empty(gate.sizes(), gate.options()), d_u = at::empty(gate.sizes(), gate.options());
  kernels::glu_bwd(gate.numel(), d.const_data_ptr<float>(), gate.const_data_ptr<float>(),
                   up.const_data_ptr<float>(), form_of(beta_gate, beta_up), d_g.mutable_data_ptr<float>(),
                   d_u.mutable_data_ptr<float>());
  return {d_g.to(g.scalar_type()), d_u.to(u.scalar_type())};
}

Tensor fwd_meta(const Tensor& g, const Tensor& /*u*/, double /*beta_gate*/, double /*beta_up*/) {
  return meta_like(g);
}

std::tuple<Tensor, Tensor> bwd_meta(const Tensor& /*d_out*/, const Tensor& g, const Tensor& u,
                                    double /*beta_gate*/, double /*beta_up*/) {
  return {meta_like(g), meta_like(u)};
}

using Fwd = decltype(fwd_cpu);
using Bwd = decltype(bwd_cpu);

class Glu : public torch::autograd::Function<Glu> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& g, const Tensor& u,
                        double beta_gate, double beta_up) {
    const at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = typed_op<Fwd>("godwit::glu_fwd");
    ctx->save_for_backward({g, u});
    ctx->saved_data["beta_gate"] = beta_gate;
    ctx->saved_data["beta_up"] = beta_up;
    return op.call(g, u, beta_gate, beta_up);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    static const auto op = typed_op<Bwd>("godwit::glu_bwd");
    const auto saved = ctx->get_saved_variables();
    const auto [d_g, d_u] = op.call(grads[0], saved[0], saved[1], ctx->saved_data["beta_gate"].toDouble(),
                                    ctx->saved_data["beta_up"].toDouble());
    return {d_g, d_u, Tensor(), Tensor()};
  }
};

Tensor glu_composite(const Tensor& g, const Tensor& u, double beta_gate, double beta_up) {
  check_arguments(g, u, beta_gate, beta_up);
  static const auto op = typed_op<Fwd>("godwit::glu_fwd");
  if (!has_kernel(op, g)) return ref::glu(g, u, beta_gate, beta_up);
  if (needs_grad(g, u)) return Glu::apply(g, u, beta_gate, beta_up);
  return op.call(g, u, beta_gate, beta_up);
}

TORCH_LIBRARY_FRAGMENT(godwit, m) {
  m.def("glu(Tensor g, Tensor u, float beta_gate, float beta_up) -> Tensor");
  m.def("glu_fwd(Tensor g, Tensor u, float beta_gate, float beta_up) -> Tensor");
  m.def(
      "glu_bwd(Tensor d_out, Tensor g, Tensor u, float beta_gate, float beta_up) -> (Tensor d_g, Tensor "
      "d_u)");
}
TORCH_LIBRARY_IMPL(godwit, CompositeImplicitAutograd, m) {
  m.impl("glu", glu_composite);
}
TORCH_LIBRARY_IMPL(godwit, CPU, m) {
  m.impl("glu_fwd", fwd_cpu);
  m.impl("glu_bwd", bwd_cpu);
}
TORCH_LIBRARY_IMPL(godwit, Meta, m) {
  m.impl("glu_fwd", fwd_meta);
  m.impl("glu_bwd", bwd_meta);
}

}  // namespace

Tensor glu(const Tensor& g, const Tensor& u, double beta_gate, double beta_up) {
  static const auto op = typed_op<decltype(glu_composite)>("godwit::glu");
  return op.call(g, u, beta_gate, beta_up);
}

}  // namespace godwit::ops
