// moe_experts: checks and dispatch.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "godwit/ops/arguments.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/moe_experts_ref.h"

namespace godwit::ops {
namespace {

constexpr const char* kOp = "moe_experts";

void check_arguments(const Tensor& z, const Tensor& experts, const Tensor& weights, const Tensor& w1,
                     const Tensor& w3, const Tensor& w2) {
  const Argument z_arg{kOp, "z", z};
  check_float(z_arg, 2);
  check_float({kOp, "w1", w1}, 3);
  const int64_t tokens = z.size(0), width = z.size(1), count = w1.size(0), inner = w1.size(1);
  check_shape({kOp, "w1", w1}, {count, inner, width});
  check_shape({kOp, "w3", w3}, {count, inner, width});
  check_shape({kOp, "w2", w2}, {count, width, inner});
  for (const Argument& w : {Argument{kOp, "w1", w1}, Argument{kOp, "w3", w3}, Argument{kOp, "w2", w2}}) {
    check_like(w, z_arg);
  }
  check_type({kOp, "experts", experts}, at::kInt);
  TORCH_CHECK(experts.dim() == 2 && experts.size(0) == tokens, kOp, ": experts: expected shape [", tokens,
              ", k], got ", experts.sizes());
  check_float({kOp, "weights", weights}, 2);
  check_shape({kOp, "weights", weights}, experts.sizes());
  check_device({kOp, "experts", experts}, z_arg);
  check_device({kOp, "weights", weights}, z_arg);
}

Tensor experts_composite(const Tensor& z, const Tensor& experts, const Tensor& weights, const Tensor& w1,
                         const Tensor& w3, const Tensor& w2, double beta_gate, double beta_up) {
  check_arguments(z, experts, weights, w1, w3, w2);
  return ref::moe_experts(z, experts, weights, w1, w3, w2, beta_gate, beta_up);
}

TORCH_LIBRARY_FRAGMENT(godwit, m) {
  m.def(
      "moe_experts(Tensor z, Tensor experts, Tensor weights, Tensor w1, Tensor w3, Tensor w2, float "
      "beta_gate, "
      "float beta_up) -> Tensor");
}
TORCH_LIBRARY_IMPL(godwit, CompositeImplicitAutograd, m) {
  m.impl("moe_experts", experts_composite);
}

}  // namespace

Tensor moe_experts(const Tensor& z, const Tensor& experts, const Tensor& weights, const Tensor& w1,
                   const Tensor& w3, const Tensor& w2, double beta_gate, double beta_up) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("godwit::moe_experts", "")
                             .typed<decltype(experts_composite)>();
  return op.call(z, experts, weights, w1, w3, w2, beta_gate, beta_up);
}

}  // namespace godwit::ops
