// CUDA registration of the router and its statistics: the Hopper kernels for fp32 logits of up to 1,024
// experts without groups; everything else takes the plain composition.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "godwit/kernels/moe_gpu.h"
#include "godwit/ops/cuda/launch.h"
#include "godwit/ops/ref/moe_router_ref.h"
#include "godwit/ops/ref/qb_histogram_ref.h"

namespace godwit::ops {
namespace {

namespace gpu = kernels::cuda;
using at::Tensor;

using Routes = std::tuple<Tensor, Tensor, Tensor, Tensor>;

bool has_kernel(const Tensor& logits) {
  return logits.scalar_type() == at::kFloat && logits.size(1) <= gpu::kRouterMaxExperts &&
         logits.size(1) % 4 == 0 && cuda::is_hopper(logits.device());
}

Routes router_cuda(const Tensor& logits, const Tensor& bias, int64_t k, bool renormalize, double scale,
                   int64_t groups, int64_t topk_groups, bool with_scores) {
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAGuard guard(logits.device());
  const bool grouped = groups > 1 && topk_groups < groups;
  if (!has_kernel(logits) || k > gpu::kRouterMaxChosen || grouped) {
    const auto [weights, experts, scores, cutoff] =
        ref::moe_router(logits, bias, k, renormalize, scale, groups, topk_groups);
    return {experts, weights, with_scores ? scores : scores.narrow(0, 0, 0), cutoff};
  }
  const Tensor x = cuda::dense(logits), b = cuda::dense(bias.to(at::kFloat));
  const int64_t T = x.size(0);
  const Tensor experts = at::empty({T, k}, x.options().dtype(at::kInt)),
               weights = at::empty({T, k}, x.options()), cutoff = at::empty({T}, x.options()),
               scores = at::empty({with_scores ? T : 0, x.size(1)}, x.options());
  const auto fp32 = [](const Tensor& t) { return cuda::pointer_as<float>(t); };
  cuda::check_launch("moe_router", gpu::moe_router_fwd({.logits = fp32(x),
                                                        .bias = fp32(b),
                                                        .tokens = T,
                                                        .experts = static_cast<int>(x.size(1)),
                                                        .k = static_cast<int>(k),
                                                        .renormalize = renormalize,
                                                        .scale = static_cast<float>(scale),
                                                        .chosen = cuda::pointer_as<int32_t>(experts),
                                                        .weights = fp32(weights),
                                                        .scores = with_scores ? fp32(scores) : nullptr,
                                                        .cutoff = fp32(cutoff),
                                                        .stream = c10::cuda::getCurrentCUDAStream()}));
  return {experts, weights, scores, cutoff};
}

// Gradient of the logits, as kernels/moe_router.h has it.
Tensor router_bwd_composition(const Tensor& d_weights, const Tensor& logits, const Tensor& experts,
                              bool renormalize, double scale) {
  const Tensor chosen = experts.to(at::kLong), s = logits.gather(1, chosen).sigmoid_();
  Tensor d = d_weights * scale;
  if (renormalize && chosen.size(1) > 1) {
    const Tensor total = s.sum(1, /*keepdim=*/true) + 1e-20;
    d = (d - (d * s).sum(1, /*keepdim=*/true) / total) / total;
  }
  return at::zeros_like(logits).scatter_(1, chosen, d * s * (1 - s));
}

Tensor router_bwd_cuda(const Tensor& d_weights, const Tensor& logits, const Tensor& experts, bool renormalize,
                       double scale) {
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAGuard guard(logits.device());
  if (!has_kernel(logits) || experts.size(1) > 32)
    return router_bwd_composition(d_weights, logits, experts, renormalize, scale);
  const Tensor d = cuda::dense(d_weights.to(at::kFloat)), x = cuda::dense(logits),
               chosen = cuda::dense(experts), d_logits = at::empty(x.sizes(), x.options());
  cuda::check_launch("moe_router backward",
                     gpu::moe_router_bwd({.d_weights = cuda::pointer_as<float>(d),
                                          .logits = cuda::pointer_as<float>(x),
                                          .chosen = cuda::pointer_as<int32_t>(chosen),
                                          .d_logits = cuda::pointer_as<float>(d_logits),
                                          .tokens = x.size(0),
                                          .experts = static_cast<int>(x.size(1)),
                                          .k = static_cast<int>(chosen.size(1)),
                                          .renormalize = renormalize,
                                          .scale = static_cast<float>(scale),
                                          .stream = c10::cuda::getCurrentCUDAStream()}));
  return d_logits;
}

void histogram_cuda(const Tensor& scores, const Tensor& cutoff, double range_min, double range_max,
                    Tensor& counts, bool from_logits) {
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAGuard guard(scores.device());
  const int64_t bins = counts.size(1);
  if (scores.scalar_type() != at::kFloat || !counts.is_contiguous() || bins > gpu::kHistogramMaxBins ||
      !cuda::is_hopper(scores.device()))
    return ref::qb_histogram(from_logits ? scores.sigmoid() : scores, cutoff, range_min, range_max, counts);
  const Tensor s = cuda::dense(scores), c = cuda::dense(cutoff);
  cuda::check_launch("qb_histogram",
                     gpu::qb_histogram({.scores = cuda::pointer_as<float>(s),
                                        .from_logits = from_logits,
                                        .cutoff = cuda::pointer_as<float>(c),
                                        .tokens = s.size(0),
                                        .experts = static_cast<int>(s.size(1)),
                                        .bins = static_cast<int>(bins),
                                        .range_min = static_cast<float>(range_min),
                                        .bins_per_unit = static_cast<float>(bins / (range_max - range_min)),
                                        .counts = cuda::pointer_as<int64_t>(counts),
                                        .stream = c10::cuda::getCurrentCUDAStream()}));
}

}  // namespace

TORCH_LIBRARY_IMPL(godwit, CUDA, m) {
  m.impl("moe_router_fwd", router_cuda);
  m.impl("moe_router_bwd", router_bwd_cuda);
  m.impl("qb_histogram_fwd", histogram_cuda);
}

}  // namespace godwit::ops
