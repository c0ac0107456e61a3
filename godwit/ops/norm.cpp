// RMS normalisation, plain and gated: schema, checks, autograd, registration. The _fwd and _bwd ops have one
// implementation a backend; CompositeExplicitAutograd is the plain composition.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "godwit/ops/autograd_util.h"
#include "godwit/ops/checks.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/norm_ref.h"

namespace godwit::ops {
namespace {

using std::optional;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// One op for both: without a gate, rms_norm.
using ForwardSignature = Tensor(const Tensor&, const optional<Tensor>&, const Tensor&, double);
// Gradients of x, gate (undefined without one), weight.
using BackwardResult = std::tuple<Tensor, Tensor, Tensor>;
using BackwardSignature = BackwardResult(const Tensor&, const Tensor&, const optional<Tensor>&, const Tensor&,
                                         double);

void check_arguments(const char* op, const Tensor& x, const optional<Tensor>& gate, const Tensor& weight) {
  TORCH_CHECK(x.dim() >= 1, op, ": x: expected at least one dimension");
  check_floating(op, "x", x);
  check_sizes(op, "weight", weight, {x.size(-1)});
  check_floating(op, "weight", weight);
  check_device(op, "weight", weight, x.device());
  if (!gate.has_value()) return;
  TORCH_CHECK(gate->sizes() == x.sizes(), op, ": gate: expected shape ", x.sizes(), ", got ", gate->sizes());
  check_floating(op, "gate", *gate);
  check_device(op, "gate", *gate, x.device());
}

Tensor call_forward(const Tensor& x, const optional<Tensor>& gate, const Tensor& weight, double eps) {
  static const auto op = typed_handle<ForwardSignature>("godwit::rms_norm_fwd");
  return op.call(x, gate, weight, eps);
}

class RmsNorm : public torch::autograd::Function<RmsNorm> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const optional<Tensor>& gate,
                        const Tensor& weight, double eps) {
    ctx->save_for_backward({x, or_undefined(gate), weight});
    ctx->saved_data["eps"] = eps;
    ctx->set_materialize_grads(false);
    return call_forward(x, gate, weight, eps);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list keep = ctx->get_saved_variables();
    variable_list out(4);
    if (!grads[0].defined()) return out;
    {
      const at::NoGradGuard no_grad;
      static const auto op = typed_handle<BackwardSignature>("godwit::rms_norm_bwd");
      std::tie(out[0], out[1], out[2]) =
          op.call(grads[0], keep[0], or_none(keep[1]), keep[2], ctx->saved_data["eps"].toDouble());
    }
    return once_differentiable("rms_norm", keep[0].requires_grad() ? keep[0] : keep[2], std::move(out));
  }
};

Tensor dispatch(const Tensor& x, const optional<Tensor>& gate, const Tensor& weight, double eps) {
  if (!needs_grad(x, gate, weight)) return call_forward(x, gate, weight, eps);
  return RmsNorm::apply(x, gate, weight, eps);
}

Tensor rms_norm_checked(const Tensor& x, const Tensor& weight, double eps) {
  check_arguments("rms_norm", x, std::nullopt, weight);
  return dispatch(x, std::nullopt, weight, eps);
}

Tensor rms_norm_gated_checked(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps) {
  check_arguments("rms_norm_gated", x, gate, weight);
  return dispatch(x, gate, weight, eps);
}

Tensor forward_meta(const Tensor& x, const optional<Tensor>&, const Tensor&, double) {
  return at::empty(x.sizes(), x.options());
}

Tensor forward_composition(const Tensor& x, const optional<Tensor>& gate, const Tensor& weight, double eps) {
  const at::NoGradGuard no_grad;
  return gate.has_value() ? ref::rms_norm_gated_ref(x, *gate, weight, eps)
                          : ref::rms_norm_ref(x, weight, eps);
}

BackwardResult backward_composition(const Tensor& grad, const Tensor& x, const optional<Tensor>& gate,
                                    const Tensor& weight, double eps) {
  return ref::rms_norm_ref_grads(grad, x, gate, weight, eps);
}

}  // namespace

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  static const auto op = typed_handle<Tensor(const Tensor&, const Tensor&, double)>("godwit::rms_norm");
  return op.call(x, weight, eps);
}

Tensor rms_norm_gated(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps) {
  static const auto op =
      typed_handle<Tensor(const Tensor&, const Tensor&, const Tensor&, double)>("godwit::rms_norm_gated");
  return op.call(x, gate, weight, eps);
}

TORCH_LIBRARY_FRAGMENT(godwit, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("rms_norm_gated(Tensor x, Tensor gate, Tensor weight, float eps) -> Tensor");
  m.def("rms_norm_fwd(Tensor x, Tensor? gate, Tensor weight, float eps) -> Tensor");
  m.def(
      "rms_norm_bwd(Tensor grad, Tensor x, Tensor? gate, Tensor weight, float eps) -> (Tensor, Tensor, "
      "Tensor)");
}

TORCH_LIBRARY_IMPL(godwit, CompositeExplicitAutograd, m) {
  m.impl("rms_norm", rms_norm_checked);
  m.impl("rms_norm_gated", rms_norm_gated_checked);
  m.impl("rms_norm_fwd", forward_composition);
  m.impl("rms_norm_bwd", backward_composition);
}

TORCH_LIBRARY_IMPL(godwit, Autograd, m) {
  m.impl("rms_norm", rms_norm_checked);
  m.impl("rms_norm_gated", rms_norm_gated_checked);
}

TORCH_LIBRARY_IMPL(godwit, Meta, m) {
  m.impl("rms_norm_fwd", forward_meta);
}

}  // namespace godwit::ops
