// Causal depthwise convolution and SiLU: schema, checks, autograd, registration. short_conv_fwd and
// short_conv_bwd have one implementation a backend; CompositeExplicitAutograd is the plain composition.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "godwit/ops/autograd_util.h"
#include "godwit/ops/checks.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/short_conv_ref.h"
#include "godwit/ops/traced.h"

namespace godwit::ops {
namespace {

using std::optional;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using ForwardResult = std::tuple<Tensor, Tensor>;
// Gradients of x, weight, initial_state (undefined if there was none).
using BackwardResult = std::tuple<Tensor, Tensor, Tensor>;
using ForwardSignature = ForwardResult(const Tensor&, const Tensor&, const optional<Tensor>&, const Tensor&);
using BackwardSignature = BackwardResult(const optional<Tensor>&, const optional<Tensor>&, const Tensor&,
                                         const Tensor&, const optional<Tensor>&, const Tensor&);

void check_arguments(const Tensor& x, const Tensor& weight, const optional<Tensor>& initial_state,
                     const Tensor& cu_seqlens) {
  if (is_dataless(x)) return;
  const char* op = "short_conv";
  check_sizes(op, "x", x, {-1, -1});
  check_floating(op, "x", x);
  check_sizes(op, "weight", weight, {x.size(1), -1});
  TORCH_CHECK(weight.size(1) > 0, op, ": weight: expected W > 0, got ", weight.sizes());
  check_dtype(op, "weight", weight, x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  check_device(op, "weight", weight, x.device());
  const int64_t n = check_cu_seqlens(op, "cu_seqlens", cu_seqlens, x.size(0));
  if (!initial_state.has_value()) return;
  check_sizes(op, "initial_state", *initial_state, {n, x.size(1), weight.size(1) - 1});
  check_floating(op, "initial_state", *initial_state);
  check_device(op, "initial_state", *initial_state, x.device());
}

ForwardResult call_forward(const Tensor& x, const Tensor& weight, const optional<Tensor>& initial_state,
                           const Tensor& cu_seqlens) {
  static const auto op = typed_handle<ForwardSignature>("godwit::short_conv_fwd");
  return op.call(x, weight, initial_state, cu_seqlens);
}

class ShortConv : public torch::autograd::Function<ShortConv> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                               const optional<Tensor>& initial_state, const Tensor& cu_seqlens) {
    ctx->save_for_backward({x, weight, or_undefined(initial_state), cu_seqlens});
    ctx->set_materialize_grads(false);
    auto [y, final_state] = call_forward(x, weight, initial_state, cu_seqlens);
    return {y, final_state};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list keep = ctx->get_saved_variables();
    variable_list out(4);
    if (!grads[0].defined() && !grads[1].defined()) return out;
    {
      const at::NoGradGuard no_grad;
      static const auto op = typed_handle<BackwardSignature>("godwit::short_conv_bwd");
      std::tie(out[0], out[1], out[2]) =
          op.call(or_none(grads[0]), or_none(grads[1]), keep[0], keep[1], or_none(keep[2]), keep[3]);
    }
    return once_differentiable("short_conv", keep[0].requires_grad() ? keep[0] : keep[1], std::move(out));
  }
};

ForwardResult short_conv_checked(const Tensor& x, const Tensor& weight, const optional<Tensor>& initial_state,
                                 const Tensor& cu_seqlens) {
  check_arguments(x, weight, initial_state, cu_seqlens);
  if (!needs_grad(x, weight, initial_state)) return call_forward(x, weight, initial_state, cu_seqlens);
  const auto out = ShortConv::apply(x, weight, initial_state, cu_seqlens);
  return {out[0], out[1]};
}

ForwardResult forward_meta(const Tensor& x, const Tensor& weight, const optional<Tensor>& initial_state,
                           const Tensor& cu_seqlens) {
  const auto type = initial_state.has_value() ? initial_state->scalar_type() : x.scalar_type();
  return {meta_like(x),
          meta_tensor({cu_seqlens.sym_size(0) - 1, x.sym_size(1), weight.sym_size(1) - 1}, x, type)};
}

BackwardResult backward_meta(const optional<Tensor>& /*grad_y*/, const optional<Tensor>& /*grad_state*/,
                             const Tensor& x, const Tensor& weight, const optional<Tensor>& initial_state,
                             const Tensor& /*cu_seqlens*/) {
  return {meta_like(x), meta_like(weight), initial_state.has_value() ? meta_like(*initial_state) : Tensor()};
}

ForwardResult forward_composition(const Tensor& x, const Tensor& weight,
                                  const optional<Tensor>& initial_state, const Tensor& cu_seqlens) {
  const at::NoGradGuard no_grad;
  return ref::short_conv_ref(x, weight, initial_state, cu_seqlens);
}

BackwardResult backward_composition(const optional<Tensor>& grad_y, const optional<Tensor>& grad_state,
                                    const Tensor& x, const Tensor& weight,
                                    const optional<Tensor>& initial_state, const Tensor& cu_seqlens) {
  return ref::short_conv_ref_grads(grad_y, grad_state, x, weight, initial_state, cu_seqlens);
}

}  // namespace

std::tuple<Tensor, Tensor> short_conv(const Tensor& x, const Tensor& weight,
                                      const std::optional<Tensor>& initial_state, const Tensor& cu_seqlens) {
  static const auto op = typed_handle<ForwardSignature>("godwit::short_conv");
  return op.call(x, weight, initial_state, cu_seqlens);
}

TORCH_LIBRARY_FRAGMENT(godwit, m) {
  m.def("short_conv(Tensor x, Tensor weight, Tensor? initial_state, Tensor cu_seqlens) -> (Tensor, Tensor)");
  m.def(
      "short_conv_fwd(Tensor x, Tensor weight, Tensor? initial_state, Tensor cu_seqlens) -> (Tensor, "
      "Tensor)");
  m.def(
      "short_conv_bwd(Tensor? grad_y, Tensor? grad_final_state, Tensor x, Tensor weight, Tensor? "
      "initial_state, Tensor cu_seqlens) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(godwit, CompositeExplicitAutograd, m) {
  m.impl("short_conv", short_conv_checked);
  m.impl("short_conv_fwd", forward_composition);
  m.impl("short_conv_bwd", backward_composition);
}

TORCH_LIBRARY_IMPL(godwit, Autograd, m) {
  m.impl("short_conv", short_conv_checked);
}

TORCH_LIBRARY_IMPL(godwit, Meta, m) {
  m.impl("short_conv_fwd", forward_meta);
  m.impl("short_conv_bwd", backward_meta);
}

}  // namespace godwit::ops
