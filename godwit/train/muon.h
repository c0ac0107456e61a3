// Muon: the momentum of a matrix is replaced by the nearest semi-orthogonal matrix before it is added.
// Jordan et al. 2024 (kellerjordan.github.io/posts/muon); scale and weight decay after Moonlight,
// arXiv:2502.16982.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace godwit {

// Newton-Schulz on each matrix of batch [n, r, c], in place. With X_0 = M / (|M|_F + 1e-7):
//   X <- a X + (b A + c A^2) X,  A = X X^T,  (a, b, c) = (3.4445, -4.7750, 2.0315),
// `steps` times; where r > c the same from the right with A = X^T X. The singular values end in about
// [0.7, 1.2]; a zero matrix stays zero.
void newton_schulz_(at::Tensor& batch, int64_t steps);

}  // namespace godwit
