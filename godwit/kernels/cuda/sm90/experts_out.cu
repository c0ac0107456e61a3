#include "godwit/kernels/cuda/sm90/experts_gemm.cuh"
#include "godwit/kernels/cuda/sm90/experts_launch.cuh"

namespace godwit::kernels::cuda::sm90 {

cudaError_t launch_out_product(const ExpertPlan& plan, const MoeShape& shape, const void* w2, const void* h,
                               void* y, cudaStream_t stream) {
  ProductArgs args;
  args.tiles = plan.tiles, args.totals = plan.totals;
  args.a_tiles = int((shape.width + kTileA - 1) / kTileA);
  args.k_blocks = int((shape.inner + kBlockK - 1) / kBlockK);
  args.features = int(shape.width);
  args.out = static_cast<__nv_bfloat16*>(y);
  cudaError_t error = row_maps(&args, plan, h, shape.inner);
  if (error == cudaSuccess) error = weight_map(&args.a[0], w2, shape.experts, shape.width, shape.inner);
  return error == cudaSuccess ? launch_product<Product::kPlain>(args, stream) : error;
}

}  // namespace godwit::kernels::cuda::sm90
