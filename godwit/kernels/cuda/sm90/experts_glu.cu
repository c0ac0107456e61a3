#include "godwit/kernels/cuda/sm90/experts_gemm.cuh"
#include "godwit/kernels/cuda/sm90/experts_launch.cuh"

namespace godwit::kernels::cuda::sm90 {

cudaError_t launch_glu_product(const ExpertPlan& plan, const MoeShape& shape, const void* w1, const void* w3,
                               const void* x, void* h, cudaStream_t stream) {
  ProductArgs args;
  args.tiles = plan.tiles, args.totals = plan.totals;
  args.a_tiles = int((shape.inner + 127) / 128);
  args.k_blocks = int((shape.width + kBlockK - 1) / kBlockK);
  args.features = int(shape.inner);
  args.form = shape.form;
  args.out = static_cast<__nv_bfloat16*>(h);
  cudaError_t error = row_maps(&args, plan, x, shape.width);
  if (error == cudaSuccess) error = weight_map(&args.a[0], w1, shape.experts, shape.inner, shape.width);
  if (error == cudaSuccess) error = weight_map(&args.a[1], w3, shape.experts, shape.inner, shape.width);
  return error == cudaSuccess ? launch_product<Product::kGlu>(args, stream) : error;
}

}  // namespace godwit::kernels::cuda::sm90
