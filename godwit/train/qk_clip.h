// QK-Clip (Kimi K2, arXiv:2507.20534): after a step, the query and key weights of a head whose largest
// attention logit S_max exceeded tau shrink so that it would have been tau. MLA only; KDA has no logits.
//   gamma = min(1, tau / S_max) per head; rows of q_nope and k_nope by sqrt(gamma), rows of q_pe by gamma, v
//   rows and the k_pe that all heads share not at all. Both parts of q.k then scale by gamma.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace godwit {

struct MlaHeadDims {
  int64_t heads = 0;
  int64_t nope = 0, rope = 0, value = 0;  // widths of a head: q = [nope | rope], kv_b = [k_nope | v]
};

struct QkClipFactors {
  at::Tensor q_rows;    // [heads * (nope + rope)] fp32, for q_b_proj (or q_proj)
  at::Tensor kv_rows;   // [heads * (nope + value)] fp32, for kv_b_proj
  int64_t clipped = 0;  // heads with gamma < 1
};

// max_logit_H [heads]: the largest scaled logit of each head over the step's batch. A head that saw no token
// may hold -inf. NaN throws.
QkClipFactors qk_clip_factors(const at::Tensor& max_logit_H, const MlaHeadDims& dims, double threshold);

// Applies the factors to plain weights, in place; returns the number of clipped heads. Weights with a master
// are scaled through Optimizer::scale_rows instead.
int64_t qk_clip(const at::Tensor& max_logit_H, at::Tensor& q_b_weight, at::Tensor& kv_b_weight,
                const MlaHeadDims& dims, double threshold);

}  // namespace godwit
