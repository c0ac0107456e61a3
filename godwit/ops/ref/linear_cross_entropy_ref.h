// Plain cross-entropy with all logits at once: the fp64 oracle, differentiable. Any device and type.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace godwit::ops::ref {

std::tuple<at::Tensor, at::Tensor> linear_cross_entropy(const at::Tensor& x, const at::Tensor& head,
                                                        const at::Tensor& targets, const at::Tensor& weights);

}  // namespace godwit::ops::ref
