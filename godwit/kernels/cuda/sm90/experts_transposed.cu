#include "godwit/kernels/cuda/sm90/experts_gemm.cuh"
#include "godwit/kernels/cuda/sm90/experts_launch.cuh"

namespace godwit::kernels::cuda::sm90 {

cudaError_t launch_transposed_product(const ExpertPlan& plan, int64_t experts, const TransposedWeights& w,
                                      const void* x, void* out, cudaStream_t stream) {
  ProductArgs args;
  const int count = w.second == nullptr ? 1 : 2;
  args.tiles = plan.tiles, args.totals = plan.totals;
  args.a_tiles = int((w.columns + kTileA - 1) / kTileA);
  args.first_blocks = int((w.rows + kBlockK - 1) / kBlockK);
  args.k_blocks = count * args.first_blocks;
  args.second_column = int(w.rows);
  args.features = int(w.columns);
  args.out = static_cast<__nv_bfloat16*>(out);
  cudaError_t error = row_maps(&args, plan, x, count * w.rows);
  if (error == cudaSuccess) error = weight_map(&args.a[0], w.first, experts, w.rows, w.columns, 64);
  if (error == cudaSuccess && count == 2)
    error = weight_map(&args.a[1], w.second, experts, w.rows, w.columns, 64);
  return error == cudaSuccess ? launch_product<Product::kTransposed>(args, stream) : error;
}

}  // namespace godwit::kernels::cuda::sm90
