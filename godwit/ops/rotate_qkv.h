// The vision tower's rotation of queries and keys.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace godwit::ops {

// Queries, keys and values, apart: qkv [P, 3, H, d] to q, k, v [P, H, d], with pair i of neighbouring
// channels of q and k turned by turns[p, i] = (cos, sin), [P, d / 2, 2] fp32 (fp64 with fp64). An op like
// those of ops.h; on Hopper in bf16 one pass forward and one backward.
std::tuple<at::Tensor, at::Tensor, at::Tensor> rotate_qkv(const at::Tensor& qkv, const at::Tensor& turns);

}  // namespace godwit::ops
