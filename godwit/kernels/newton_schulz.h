// Newton-Schulz orthogonalisation of many small matrices (Muon; Jordan et al. 2024,
// kellerjordan.github.io/posts/muon).
//
//   X_0 = M / (|M|_F + 1e-7);  A_k = X_k X_k^T;  X_{k+1} = (a I + b A_k + c A_k^2) X_k =: B_k X_k
//
// All B_k are polynomials of A_0 and commute, so the iteration runs on r x r matrices only, r the smaller
// side:
//   A_{k+1} = B_k A_k B_k,  P_{k+1} = B_k P_k,  P_0 = I,  and at the end X = P X_0.
// One matrix stays in the first two cache levels, no transposed copy of X is needed, and every product is of
// square symmetric matrices.
#pragma once

#include <cstdint>

namespace godwit::kernels {

// Sides up to this are done by the kernel; larger matrices are better served by a plain GEMM.
inline constexpr int64_t kNewtonSchulzMaxSide = 128;

struct NewtonSchulzParams {
  float* batch = nullptr;  // [n, rows, cols], in place
  int64_t n = 0, rows = 0, cols = 0;
  int64_t steps = 5;
};

// min(rows, cols) <= kNewtonSchulzMaxSide. Parallel over the matrices; the result does not depend on the
// number of threads.
void newton_schulz_cpu(const NewtonSchulzParams& params);

}  // namespace godwit::kernels
