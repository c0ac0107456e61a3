// Launchers of the grouped products (experts_gemm.cuh).
#pragma once

#include <cuda_runtime.h>

#include "godwit/kernels/cuda/sm90/experts_plan.cuh"
#include "godwit/kernels/moe_experts.h"

namespace godwit::kernels::cuda::sm90 {

struct ProductArgs;  // experts_gemm.cuh

// h[r, i] = glu(w1_e x_r, w3_e x_r); x [rows, width], h [rows, inner], bf16. With gate_up [rows, 2 inner]
// both products are kept there, rounded to bf16.
struct GluCall {
  const void* w1 = nullptr;
  const void* w3 = nullptr;
  const void* x = nullptr;
  void* h = nullptr;
  void* gate_up = nullptr;
};
cudaError_t launch_glu_product(const ExpertPlan& plan, const MoeShape& shape, const GluCall& g,
                               cudaStream_t stream);
// y[r, l] = w2_e h_r; h [rows, inner], y [rows, width].
cudaError_t launch_out_product(const ExpertPlan& plan, const MoeShape& shape, const void* w2, const void* h,
                               void* y, cudaStream_t stream);

// The same from MXFP4 weights, width and inner multiples of 512, for a plan of tiles of packed_tile_rows
// rows. x and h have their values in the order of permuted_k (experts_mxfp4.cuh), which this gather makes.
int packed_tile_rows();
cudaError_t launch_gather_permuted(const ExpertPlan& plan, const void* source, int k, int width, void* rows,
                                   cudaStream_t stream);
cudaError_t launch_packed_glu_product(const ExpertPlan& plan, const MoeShape& shape, const MoeWeights& w,
                                      const void* x, void* h, cudaStream_t stream);
cudaError_t launch_packed_out_product(const ExpertPlan& plan, const MoeShape& shape, const MoeWeights& w,
                                      const void* h, void* y, cudaStream_t stream);

// out[r, c] = sum_k w_e[k, c] x[r, k] with w [experts, rows, columns], x [.., rows]; with a second weight x
// is [.., 2 rows] and the products are added.
struct TransposedWeights {
  const void* first = nullptr;
  const void* second = nullptr;
  int64_t rows = 0;
  int64_t columns = 0;
};
cudaError_t launch_transposed_product(const ExpertPlan& plan, int64_t experts, const TransposedWeights& w,
                                      const void* x, void* out, cudaStream_t stream);

// The gradients of both products [rows, 2 inner], of which act has that of the unweighted activation when it
// begins and p a when it ends; gate_up may be d_gate_up. d_weights [T, k] may be null.
struct GluGradientCall {
  const void* gate_up = nullptr;  // [rows, 2 inner]
  const float* weights = nullptr;
  void* d_gate_up = nullptr;  // [rows, 2 inner]
  void* act = nullptr;        // [rows, inner]
  float* d_weights = nullptr;
};
cudaError_t launch_glu_gradient(const ExpertPlan& plan, const MoeShape& shape, const GluGradientCall& g,
                                cudaStream_t stream);

// In a file of its own, for the compiler's sake.
cudaError_t launch_glu_keep(const ProductArgs& args, cudaStream_t stream);

// out[e, m, n] = sum over the rows of e of a[r, m] b[r, n].
struct Rows {
  const void* data = nullptr;
  int width = 0;
  int64_t stride = 0;  // values between rows
};
cudaError_t launch_weight_gradient(const ExpertPlan& plan, int experts, const Rows& a, const Rows& b,
                                   void* out, cudaStream_t stream);

}  // namespace godwit::kernels::cuda::sm90
