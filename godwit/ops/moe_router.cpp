// moe_router: checks and dispatch.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "godwit/ops/arguments.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/moe_router_ref.h"

namespace godwit::ops {
namespace {

void check_arguments(const Tensor& logits, const Tensor& bias, int64_t k, int64_t groups,
                     int64_t topk_groups) {
  check_float({"moe_router", "logits", logits}, 2);
  TORCH_CHECK(logits.scalar_type() == at::kFloat || logits.scalar_type() == at::kDouble,
              "moe_router: logits: expected float32 (scores are not rounded), got ", logits.scalar_type());
  const int64_t experts = logits.size(1);
  check_float({"moe_router", "bias", bias}, 1);
  check_shape({"moe_router", "bias", bias}, {experts});
  check_device({"moe_router", "bias", bias}, {"moe_router", "logits", logits});
  TORCH_CHECK(k >= 1 && k <= experts, "moe_router: k: expected 1 to ", experts, " (the experts), got ", k);
  TORCH_CHECK(groups >= 1 && experts % groups == 0, "moe_router: groups: expected a divisor of ", experts,
              " experts, got ", groups);
  TORCH_CHECK(
      groups == 1 || (topk_groups >= 1 && topk_groups <= groups && topk_groups * (experts / groups) >= k),
      "moe_router: topk_groups: expected 1 to ", groups, " groups that hold at least k = ", k,
      " experts, got ", topk_groups);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> router_composite(const Tensor& logits, const Tensor& bias,
                                                            int64_t k, bool renormalize, double scale,
                                                            int64_t groups, int64_t topk_groups) {
  check_arguments(logits, bias, k, groups, topk_groups);
  return ref::moe_router(logits, bias, k, renormalize, scale, groups, topk_groups);
}

TORCH_LIBRARY_FRAGMENT(godwit, m) {
  m.def(
      "moe_router(Tensor logits, Tensor bias, int k, bool renormalize, float scale, int groups, int "
      "topk_groups) "
      "-> (Tensor experts, Tensor weights, Tensor scores, Tensor cutoff)");
}
TORCH_LIBRARY_IMPL(godwit, CompositeImplicitAutograd, m) {
  m.impl("moe_router", router_composite);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> moe_router(const Tensor& logits, const Tensor& bias, int64_t k,
                                                      bool renormalize, double scale, int64_t groups,
                                                      int64_t topk_groups) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("godwit::moe_router", "")
                             .typed<decltype(router_composite)>();
  return op.call(logits, bias, k, renormalize, scale, groups, topk_groups);
}

}  // namespace godwit::ops
