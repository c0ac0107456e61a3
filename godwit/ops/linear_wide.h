#pragma once

#include <ATen/core/Tensor.h>

namespace godwit::ops {

// y = x weight^T in fp32 (fp64 for fp64), unrounded, from inputs of any type; x [T, K], weight [N, K].
at::Tensor linear_wide(const at::Tensor& x, const at::Tensor& weight);

}  // namespace godwit::ops
