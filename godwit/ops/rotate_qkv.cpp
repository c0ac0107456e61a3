// rotate_qkv: checks, autograd and dispatch. One pass over the tower's queries, keys and values on Hopper in
// bf16; elsewhere the composition.
#include "godwit/ops/rotate_qkv.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "godwit/ops/arguments.h"
#include "godwit/ops/dispatch.h"
#include "godwit/ops/ref/rotate_ref.h"
#include "godwit/ops/traced.h"

namespace godwit::ops {
namespace {

using at::Tensor;

constexpr const char* kOp = "rotate_qkv";

void check_arguments(const Tensor& qkv, const Tensor& turns) {
  const Argument qkv_arg{kOp, "qkv", qkv}, turns_arg{kOp, "turns", turns};
  check_float(qkv_arg, 4);
  check_shape(qkv_arg, {qkv.size(0), 3, qkv.size(2), qkv.size(3)});
  TORCH_CHECK(qkv.size(3) % 2 == 0, kOp, ": qkv: expected pairs of channels, got ", qkv.sizes());
  check_type(turns_arg, qkv.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  check_shape(turns_arg, {qkv.size(0), qkv.size(3) / 2, 2});
  check_device(turns_arg, qkv_arg);
}

using Fwd = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&);
using Bwd = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&);

class RotateQkv : public torch::autograd::Function<RotateQkv> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const Tensor& qkv,
                                                const Tensor& turns) {
    const at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = typed_op<Fwd>("godwit::rotate_qkv_fwd");
    ctx->save_for_backward({turns});
    const auto [q, k, v] = op.call(qkv, turns);
    return {q, k, v};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    static const auto op = typed_op<Bwd>("godwit::rotate_qkv_bwd");
    return {op.call(grads[0], grads[1], grads[2], ctx->get_saved_variables()[0]), Tensor()};
  }
};

std::tuple<Tensor, Tensor, Tensor> rotate_qkv_composite(const Tensor& qkv, const Tensor& turns) {
  if (!is_dataless(qkv)) check_arguments(qkv, turns);
  static const auto op = typed_op<Fwd>("godwit::rotate_qkv_fwd");
  const bool fused = !is_observed(qkv) && qkv.is_cuda() && qkv.scalar_type() == at::kBFloat16 &&
                     qkv.size(3) % 8 == 0 && has_kernel(op, qkv);
  if (!fused) return ref::rotate_qkv(qkv, turns);
  if (!needs_grad(qkv)) return op.call(qkv, turns);
  const auto out = RotateQkv::apply(qkv, turns);
  return {out[0], out[1], out[2]};
}

TORCH_LIBRARY_FRAGMENT(godwit, m) {
  m.def("rotate_qkv(Tensor qkv, Tensor turns) -> (Tensor q, Tensor k, Tensor v)");
  m.def("rotate_qkv_fwd(Tensor qkv, Tensor turns) -> (Tensor q, Tensor k, Tensor v)");
  m.def("rotate_qkv_bwd(Tensor d_q, Tensor d_k, Tensor d_v, Tensor turns) -> Tensor d_qkv");
}
TORCH_LIBRARY_IMPL(godwit, CompositeImplicitAutograd, m) {
  m.impl("rotate_qkv", rotate_qkv_composite);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> rotate_qkv(const Tensor& qkv, const Tensor& turns) {
  static const auto op = typed_op<decltype(rotate_qkv_composite)>("godwit::rotate_qkv");
  return op.call(qkv, turns);
}

}  // namespace godwit::ops
