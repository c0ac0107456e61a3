// Plain causal attention over packed sequences with the whole score matrix: the fp64 oracle, differentiable.
// Any device and type; not for long sequences.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace godwit::ops::ref {

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cu_q,
                     const at::Tensor& cu_k, double scale, int64_t window);

}  // namespace godwit::ops::ref
