// Attention of a long prompt's piece on a GPU, over many keys before it.
#pragma once

#include <ATen/core/Tensor.h>

namespace godwit::ops {

// Keys of one part, for which cuDNN has one plan whatever the context's length.
inline constexpr int64_t kPastBlock = 8192;
// Queries of a piece are cut to multiples of it, for the same reason.
inline constexpr int64_t kRegularQueries = 1024;

// Whether attention_over_past takes these: one sequence in 16 bits on a GPU, no gradient (the caller's to
// know), at least a block of keys before the first query, no window.
bool takes_attention_over_past(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

// q [T, H, D] behind S - T keys of k [S, H, D], v [S, H, V]: [T, H, V].
at::Tensor attention_over_past(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale);

}  // namespace godwit::ops
