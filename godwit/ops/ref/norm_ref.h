// RMS normalisation in plain ATen: any floating dtype, any device, differentiable.
#pragma once

#include <ATen/core/Tensor.h>

namespace godwit::ops::ref {

// As in ops.h. Compute in fp64 if x is fp64, else in fp32; the result has x's dtype.
at::Tensor rms_norm_ref(const at::Tensor& x, const at::Tensor& weight, double eps);
at::Tensor rms_norm_gated_ref(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight,
                              double eps);

}  // namespace godwit::ops::ref
