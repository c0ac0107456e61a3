// Plain composition of moe_experts: rows sorted by expert, grouped products, weighted sum over the k slots.
// Any device and type, differentiable. Rounds where the released BF16 model does: the inner activation and
// each expert's output to the input type, the weighted sum in fp32.
#pragma once

#include <ATen/core/Tensor.h>

namespace godwit::ops::ref {

at::Tensor moe_experts(const at::Tensor& z, const at::Tensor& experts, const at::Tensor& weights,
                       const at::Tensor& w1, const at::Tensor& w3, const at::Tensor& w2, double beta_gate,
                       double beta_up);

}  // namespace godwit::ops::ref
