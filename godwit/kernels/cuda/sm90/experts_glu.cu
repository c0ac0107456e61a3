#include "godwit/kernels/cuda/sm90/experts_gemm.cuh"
#include "godwit/kernels/cuda/sm90/experts_launch.cuh"

namespace godwit::kernels::cuda::sm90 {

cudaError_t glu_args(const ExpertPlan& plan, const MoeShape& shape, const GluCall& g, ProductArgs* args) {
  args->tiles = plan.tiles, args->totals = plan.totals;
  args->a_tiles = int((shape.inner + 127) / 128);
  args->k_blocks = int((shape.width + kBlockK - 1) / kBlockK);
  args->features = int(shape.inner);
  args->form = shape.form;
  args->out = static_cast<__nv_bfloat16*>(g.h);
  args->grad.gate_up = static_cast<__nv_bfloat16*>(g.gate_up);
  cudaError_t error = row_maps(args, plan, g.x, shape.width);
  if (error == cudaSuccess) error = weight_map(&args->a[0], g.w1, shape.experts, shape.inner, shape.width);
  if (error == cudaSuccess) error = weight_map(&args->a[1], g.w3, shape.experts, shape.inner, shape.width);
  return error;
}

cudaError_t launch_glu_product(const ExpertPlan& plan, const MoeShape& shape, const GluCall& g,
                               cudaStream_t stream) {
  ProductArgs args;
  const cudaError_t error = glu_args(plan, shape, g, &args);
  if (error != cudaSuccess) return error;
  return g.gate_up != nullptr ? launch_glu_keep(args, stream) : launch_product<Product::kGlu>(args, stream);
}

}  // namespace godwit::kernels::cuda::sm90
