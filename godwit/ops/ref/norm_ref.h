// RMS normalisation in plain ATen: any floating dtype, any device, differentiable.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace godwit::ops::ref {

// As in ops.h. Compute in fp64 if x is fp64, else in fp32; the result has x's dtype.
at::Tensor rms_norm_ref(const at::Tensor& x, const at::Tensor& weight, double eps);
at::Tensor rms_norm_gated_ref(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight,
                              double eps);

// Gradients of x, gate (undefined without one), weight by autograd through them.
std::tuple<at::Tensor, at::Tensor, at::Tensor> rms_norm_ref_grads(const at::Tensor& grad, const at::Tensor& x,
                                                                  const std::optional<at::Tensor>& gate,
                                                                  const at::Tensor& weight, double eps);

}  // namespace godwit::ops::ref
