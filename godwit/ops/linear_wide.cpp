// linear_wide: y = x weight^T in fp32 (fp64 inputs: in fp64) from inputs as they are. On a GPU the products
// of 16-bit inputs are exact and summed in fp32 by the tensor cores, twenty times as fast as products of fp32
// copies; elsewhere it is linear of such copies. Of the gradient of y a GPU takes x's type.
#include "godwit/ops/linear_wide.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "godwit/ops/arguments.h"
#include "godwit/ops/autograd_util.h"
#include "godwit/ops/ops.h"

namespace godwit::ops {
namespace {

class LinearWide : public torch::autograd::Function<LinearWide> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, const Tensor& weight) {
    ctx->save_for_backward({x, weight});
    return at::mm(x, weight.t(), at::kFloat);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor d = grads[0].to(saved[0].scalar_type());
    return {ctx->needs_input_grad(0) ? d.mm(saved[1]) : Tensor(),
            ctx->needs_input_grad(1) ? d.t().mm(saved[0]) : Tensor()};
  }
};

}  // namespace

Tensor linear_wide(const Tensor& x, const Tensor& weight) {
  const bool exact = x.is_cuda() && at::isReducedFloatingType(x.scalar_type()) && x.dim() == 2 &&
                     weight.scalar_type() == x.scalar_type();
  if (!exact) {
    const auto type = work_type(x);
    return ops::linear(x.to(type), weight.to(type));
  }
  if (needs_grad(x, weight)) return LinearWide::apply(x, weight);
  return at::mm(x, weight.t(), at::kFloat);
}

}  // namespace godwit::ops
