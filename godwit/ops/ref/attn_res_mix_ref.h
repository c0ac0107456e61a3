// Plain composition of attn_res_mix (Attention Residuals, arXiv 2603.15031 eq. 2-3). Any device and type,
// differentiable.
#pragma once

#include <ATen/core/Tensor.h>

namespace godwit::ops::ref {

at::Tensor attn_res_mix(at::TensorList sources, const at::Tensor& norm_weight, const at::Tensor& query,
                        double eps);

}  // namespace godwit::ops::ref
