#include "godwit/ops/ref/moe_router_ref.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

namespace godwit::ops::ref {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// Largest first, equal values by index.
std::tuple<at::Tensor, at::Tensor> ranked(const at::Tensor& x) {
  return at::sort(x, /*stable=*/true, /*dim=*/-1, /*descending=*/true);
}

// A group's score is the sum of its two largest biased scores; outside the best topk_groups groups the biased
// scores become -inf.
at::Tensor limit_to_groups(const at::Tensor& biased_TE, int64_t groups, int64_t topk_groups) {
  const int64_t tokens = biased_TE.size(0);
  const int64_t per_group = biased_TE.size(1) / groups;
  const at::Tensor by_group = biased_TE.reshape({tokens, groups, per_group});
  const at::Tensor score_TG =
      std::get<0>(ranked(by_group)).narrow(-1, 0, std::min<int64_t>(2, per_group)).sum(-1);
  const at::Tensor best = std::get<1>(ranked(score_TG)).narrow(-1, 0, topk_groups);
  const at::Tensor keep_TG =
      at::zeros_like(score_TG, score_TG.options().dtype(at::kBool)).scatter(1, best, true);
  return by_group.masked_fill(keep_TG.logical_not().unsqueeze(-1), kMinusInfinity)
      .reshape({tokens, biased_TE.size(1)});
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> moe_router(const at::Tensor& logits,
                                                                      const at::Tensor& bias, int64_t k,
                                                                      bool renormalize, double scale,
                                                                      int64_t groups, int64_t topk_groups) {
  const int64_t experts = logits.size(1);
  const at::Tensor scores = at::sigmoid(logits);
  at::Tensor biased = scores.detach() + bias.detach().to(logits.scalar_type());
  if (groups > 1 && topk_groups < groups) biased = limit_to_groups(biased, groups, topk_groups);
  const auto [values, order] = ranked(biased);
  const at::Tensor chosen = order.narrow(1, 0, k);
  const at::Tensor cutoff = k < experts ? values.select(1, k).contiguous()
                                        : at::full({logits.size(0)}, kMinusInfinity, logits.options());
  at::Tensor weights = scores.gather(1, chosen);
  if (renormalize && k > 1) weights = weights / (weights.sum(1, /*keepdim=*/true) + 1e-20);
  return {weights * scale, chosen.to(at::kInt), scores.detach(), cutoff.detach()};
}

}  // namespace godwit::ops::ref
