// moe_router: checks, autograd and dispatch.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>

#include "godwit/kernels/moe_router.h"
#include "godwit/ops/arguments.h"
#include "godwit/ops/dispatch.h"
#include "godwit/ops/moe_routing.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/moe_router_ref.h"
#include "godwit/ops/traced.h"

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

using Routes = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Routes empty_routes(const Tensor& logits, int64_t k, bool with_scores) {
  const c10::SymInt tokens = logits.sym_size(0), scored = with_scores ? tokens : c10::SymInt(0);
  return {meta_tensor({tokens, k}, logits, at::kInt), meta_tensor({tokens, k}, logits),
          meta_tensor({scored, logits.sym_size(1)}, logits), meta_tensor({tokens}, logits)};
}

Routes fwd_cpu(const Tensor& logits, const Tensor& bias, int64_t k, bool renormalize, double scale,
               int64_t groups, int64_t topk_groups, bool with_scores) {
  const Tensor x = as_float(logits), b = as_float(bias);
  auto [experts, weights, scores, cutoff] = empty_routes(x, k, with_scores);
  kernels::moe_router_fwd(x.size(0), {.form = {.experts = x.size(1),
                                               .k = k,
                                               .renormalize = renormalize,
                                               .scale = static_cast<float>(scale),
                                               .groups = groups,
                                               .topk_groups = topk_groups},
                                      .logits = x.const_data_ptr<float>(),
                                      .bias = b.const_data_ptr<float>(),
                                      .chosen = experts.mutable_data_ptr<int32_t>(),
                                      .weights = weights.mutable_data_ptr<float>(),
                                      .scores = with_scores ? scores.mutable_data_ptr<float>() : nullptr,
                                      .cutoff = cutoff.mutable_data_ptr<float>()});
  return {experts, weights, scores, cutoff};
}

Tensor bwd_cpu(const Tensor& d_weights, const Tensor& logits, const Tensor& experts, bool renormalize,
               double scale) {
  const Tensor d = as_float(d_weights), x = as_float(logits), chosen = experts.contiguous();
  Tensor d_logits = at::empty(x.sizes(), x.options());
  kernels::moe_router_bwd(x.size(0), {.form = {.experts = x.size(1),
                                               .k = d.size(1),
                                               .renormalize = renormalize,
                                               .scale = static_cast<float>(scale)},
                                      .d_weights = d.const_data_ptr<float>(),
                                      .logits = x.const_data_ptr<float>(),
                                      .chosen = chosen.const_data_ptr<int32_t>(),
                                      .d_logits = d_logits.mutable_data_ptr<float>()});
  return d_logits;
}

Routes fwd_meta(const Tensor& logits, const Tensor& /*bias*/, int64_t k, bool /*renormalize*/,
                double /*scale*/, int64_t /*groups*/, int64_t /*topk_groups*/, bool with_scores) {
  return empty_routes(logits, k, with_scores);
}

Tensor bwd_meta(const Tensor& /*d_weights*/, const Tensor& logits, const Tensor& /*experts*/,
                bool /*renormalize*/, double /*scale*/) {
  return meta_like(logits);
}

using Fwd = decltype(fwd_cpu);
using Bwd = decltype(bwd_cpu);

class Router : public torch::autograd::Function<Router> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const Tensor& logits,
                                                const Tensor& bias, int64_t k, bool renormalize, double scale,
                                                int64_t groups, int64_t topk_groups, bool with_scores) {
    const at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = typed_op<Fwd>("godwit::moe_router_fwd");
    const auto [experts, weights, scores, cutoff] =
        op.call(logits, bias, k, renormalize, scale, groups, topk_groups, with_scores);
    ctx->save_for_backward({logits, experts});
    ctx->saved_data["renormalize"] = renormalize;
    ctx->saved_data["scale"] = scale;
    ctx->mark_non_differentiable({experts, scores, cutoff});
    return {experts, weights, scores, cutoff};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    static const auto op = typed_op<Bwd>("godwit::moe_router_bwd");
    const auto saved = ctx->get_saved_variables();
    const Tensor d_logits = op.call(grads[1], saved[0], saved[1], ctx->saved_data["renormalize"].toBool(),
                                    ctx->saved_data["scale"].toDouble());
    return {d_logits, Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

Routes router_composite(const Tensor& logits, const Tensor& bias, int64_t k, bool renormalize, double scale,
                        int64_t groups, int64_t topk_groups, bool with_scores) {
  if (!is_dataless(logits)) check_arguments(logits, bias, k, groups, topk_groups);
  static const auto op = typed_op<Fwd>("godwit::moe_router_fwd");
  const auto weights_first = [](const Routes& r) {
    return Routes{std::get<1>(r), std::get<0>(r), std::get<2>(r), std::get<3>(r)};
  };
  if (!has_kernel(op, logits)) {
    Routes r = ref::moe_router(logits, bias, k, renormalize, scale, groups, topk_groups);
    if (!with_scores) std::get<2>(r) = std::get<2>(r).narrow(0, 0, 0);
    return r;
  }
  const Tensor detached = bias.detach();
  if (!needs_grad(logits)) {
    return weights_first(op.call(logits, detached, k, renormalize, scale, groups, topk_groups, with_scores));
  }
  const auto out = Router::apply(logits, detached, k, renormalize, scale, groups, topk_groups, with_scores);
  return {out[1], out[0], out[2], out[3]};
}

TORCH_LIBRARY_FRAGMENT(godwit, m) {
  m.def(
      "moe_router(Tensor logits, Tensor bias, int k, bool renormalize, float scale, int groups, int "
      "topk_groups, bool with_scores=True) -> "
      "(Tensor weights, Tensor experts, Tensor scores, Tensor cutoff)");
  m.def(
      "moe_router_fwd(Tensor logits, Tensor bias, int k, bool renormalize, float scale, int groups, int "
      "topk_groups, bool with_scores) -> "
      "(Tensor experts, Tensor weights, Tensor scores, Tensor cutoff)");
  m.def(
      "moe_router_bwd(Tensor d_weights, Tensor logits, Tensor experts, bool renormalize, float scale) -> "
      "Tensor");
}
TORCH_LIBRARY_IMPL(godwit, CompositeImplicitAutograd, m) {
  m.impl("moe_router", router_composite);
}
TORCH_LIBRARY_IMPL(godwit, CPU, m) {
  m.impl("moe_router_fwd", fwd_cpu);
  m.impl("moe_router_bwd", bwd_cpu);
}
TORCH_LIBRARY_IMPL(godwit, Meta, m) {
  m.impl("moe_router_fwd", fwd_meta);
  m.impl("moe_router_bwd", bwd_meta);
}

Routes call(const Tensor& logits, const Tensor& bias, int64_t k, bool renormalize, double scale,
            int64_t groups, int64_t topk_groups, bool with_scores) {
  static const auto op = typed_op<decltype(router_composite)>("godwit::moe_router");
  return op.call(logits, bias, k, renormalize, scale, groups, topk_groups, with_scores);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> moe_router(const Tensor& logits, const Tensor& bias, int64_t k,
                                                      bool renormalize, double scale, int64_t groups,
                                                      int64_t topk_groups) {
  return call(logits, bias, k, renormalize, scale, groups, topk_groups, /*with_scores=*/true);
}

std::tuple<Tensor, Tensor, Tensor> moe_route(const Tensor& logits, const Tensor& bias, int64_t k,
                                             bool renormalize, double scale, int64_t groups,
                                             int64_t topk_groups) {
  const auto [weights, experts, scores, cutoff] =
      call(logits, bias, k, renormalize, scale, groups, topk_groups, /*with_scores=*/false);
  return {weights, experts, cutoff};
}

}  // namespace godwit::ops
