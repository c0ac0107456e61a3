// Plain composition of rotate_qkv: any device and type, differentiable by autograd. Oracle in fp64.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace godwit::ops::ref {

std::tuple<at::Tensor, at::Tensor, at::Tensor> rotate_qkv(const at::Tensor& qkv, const at::Tensor& turns);

// The gradient of qkv.
at::Tensor rotate_qkv_grad(const at::Tensor& d_q, const at::Tensor& d_k, const at::Tensor& d_v,
                           const at::Tensor& turns);

}  // namespace godwit::ops::ref
