// Plain composition of Muon's elementwise passes, in place. Any device and type.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace godwit::ops::ref {

void muon_momentum_(at::Tensor& momentum, const at::Tensor& grad, at::Tensor& update, double grad_scale,
                    double mu, bool nesterov);

void muon_weight_(at::Tensor& weight, const at::Tensor& update, const std::optional<at::Tensor>& copy,
                  double keep, double rate);

// Symmetric matrices [n, s, s] whose blocks of `block` rows are there up to the diagonal's block: the rest is
// mirrored.
void mirror_lower_(at::Tensor& batch, int64_t block);

}  // namespace godwit::ops::ref
