#include "godwit/train/qk_clip.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "godwit/base/check.h"

namespace godwit {

QkClipFactors qk_clip_factors(const at::Tensor& max_logit_H, const MlaHeadDims& dims, double threshold) {
  check(max_logit_H.dim() == 1 && max_logit_H.size(0) == dims.heads,
        "qk_clip: expected the largest logit of {} heads, got {}", dims.heads, max_logit_H.numel());
  check(threshold > 0, "qk_clip: expected a threshold above 0, got {}", threshold);
  at::NoGradGuard no_grad;
  const at::Tensor logit = max_logit_H.to(at::kFloat);
  check(!at::isnan(logit).any().item<bool>(), "qk_clip: the largest logit of a head is NaN");
  const at::Tensor gamma = at::where(logit > threshold, threshold / logit, at::ones_like(logit));
  const auto widen = [&](const at::Tensor& factor, int64_t width) {
    return factor.unsqueeze(1).expand({dims.heads, width});
  };
  const at::Tensor root = gamma.sqrt();
  return {
      .q_rows = at::cat({widen(root, dims.nope), widen(gamma, dims.rope)}, 1).reshape(-1),
      .kv_rows = at::cat({widen(root, dims.nope), widen(at::ones_like(gamma), dims.value)}, 1).reshape(-1),
      .clipped = (gamma < 1).sum().item<int64_t>()};
}

int64_t qk_clip(const at::Tensor& max_logit_H, at::Tensor& q_b_weight, at::Tensor& kv_b_weight,
                const MlaHeadDims& dims, double threshold) {
  at::NoGradGuard no_grad;
  const QkClipFactors factors = qk_clip_factors(max_logit_H, dims, threshold);
  check(q_b_weight.size(0) == factors.q_rows.size(0) && kv_b_weight.size(0) == factors.kv_rows.size(0),
        "qk_clip: expected {} and {} rows, got {} and {}", factors.q_rows.size(0), factors.kv_rows.size(0),
        q_b_weight.size(0), kv_b_weight.size(0));
  q_b_weight.copy_(q_b_weight * factors.q_rows.unsqueeze(1));  // the product in fp32, rounded once
  kv_b_weight.copy_(kv_b_weight * factors.kv_rows.unsqueeze(1));
  return factors.clipped;
}

}  // namespace godwit
