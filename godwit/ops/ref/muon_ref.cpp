#include "godwit/ops/ref/muon_ref.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace godwit::ops::ref {

void muon_momentum_(at::Tensor& momentum, const at::Tensor& grad, at::Tensor& update, double grad_scale,
                    double mu, bool nesterov) {
  momentum.mul_(mu).add_(grad, grad_scale);
  if (nesterov)
    update.copy_(at::mul(momentum, mu).add_(grad, grad_scale));
  else
    update.copy_(momentum);
}

void muon_weight_(at::Tensor& weight, const at::Tensor& update, const std::optional<at::Tensor>& copy,
                  double keep, double rate) {
  if (keep != 1) weight.mul_(keep);
  weight.add_(update, -rate);
  if (copy) at::Tensor(*copy).copy_(weight);
}

void mirror_lower_(at::Tensor& batch, int64_t block) {
  for (int64_t from = block; from < batch.size(1); from += block) {
    const int64_t rows = std::min(block, batch.size(1) - from);
    batch.narrow(1, 0, from).narrow(2, from, rows).copy_(batch.narrow(1, from, rows).narrow(2, 0, from).mT());
  }
}

}  // namespace godwit::ops::ref
