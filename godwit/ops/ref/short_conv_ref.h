// Causal depthwise convolution and SiLU in plain ATen: any floating dtype, any device, differentiable.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace godwit::ops::ref {

// As short_conv in ops.h. Computes in fp64 if x is fp64, else in fp32. The final state has initial_state's
// dtype, or x's without one.
std::tuple<at::Tensor, at::Tensor> short_conv_ref(const at::Tensor& x, const at::Tensor& weight,
                                                  const std::optional<at::Tensor>& initial_state,
                                                  const at::Tensor& cu_seqlens);

// Gradients of x, weight, initial_state (undefined if there is none) by autograd through it. An absent output
// gradient counts as zero.
std::tuple<at::Tensor, at::Tensor, at::Tensor> short_conv_ref_grads(
    const std::optional<at::Tensor>& grad_y, const std::optional<at::Tensor>& grad_final_state,
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& initial_state,
    const at::Tensor& cu_seqlens);

}  // namespace godwit::ops::ref
