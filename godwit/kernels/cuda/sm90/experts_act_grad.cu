#include "godwit/kernels/cuda/sm90/experts_gemm.cuh"
#include "godwit/kernels/cuda/sm90/experts_launch.cuh"

namespace godwit::kernels::cuda::sm90 {

cudaError_t launch_activation_gradient(const ExpertPlan& plan, const MoeShape& shape,
                                       const GluGradientCall& g, const GluGradArgs& grad,
                                       cudaStream_t stream) {
  ProductArgs args;
  args.tiles = plan.tiles, args.totals = plan.totals;
  args.a_tiles = int((shape.inner + kTileA - 1) / kTileA);
  args.k_blocks = args.first_blocks = int((shape.width + kBlockK - 1) / kBlockK);
  args.features = int(shape.inner);
  args.form = shape.form;
  args.grad = grad;
  cudaError_t error = row_maps(&args, plan, g.d, shape.width);
  if (error == cudaSuccess) error = weight_map(&args.a[0], g.w2, shape.experts, shape.width, shape.inner, 64);
  return error == cudaSuccess ? launch_product<Product::kActGrad>(args, stream) : error;
}

}  // namespace godwit::kernels::cuda::sm90
