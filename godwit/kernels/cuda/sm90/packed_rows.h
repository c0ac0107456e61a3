// Launchers of the products with packed weights of any width (packed_rows.cuh).
#pragma once

#include <cuda_runtime.h>

#include "godwit/kernels/cuda/sm90/experts_plan.cuh"
#include "godwit/kernels/moe_experts.h"

namespace godwit::kernels::cuda::sm90 {

// Rows of the widest tile of a plan for these sizes. Which kernel runs depends on the shape alone.
int packed_rows_tile(const MoeShape& shape);
// h[r, i] = glu(w1_e z_t, w3_e z_t) of every row r, whose token is t; h [rows, inner].
cudaError_t launch_packed_rows_glu(const ExpertPlan& plan, const MoeShape& shape, const MoeWeights& w,
                                   const void* z, void* h, cudaStream_t stream);
// y[r, l] = w2_e h_r; y [rows, width].
cudaError_t launch_packed_rows_out(const ExpertPlan& plan, const MoeShape& shape, const MoeWeights& w,
                                   const void* h, void* y, cudaStream_t stream);

}  // namespace godwit::kernels::cuda::sm90
