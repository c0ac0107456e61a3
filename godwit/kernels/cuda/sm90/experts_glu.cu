#include "godwit/kernels/cuda/sm90/experts_gemm.cuh"
#include "godwit/kernels/cuda/sm90/experts_launch.cuh"

namespace godwit::kernels::cuda::sm90 {

cudaError_t launch_glu_product(const ExpertPlan& plan, const MoeShape& shape, const GluCall& g,
                               cudaStream_t stream) {
  ProductArgs args;
  args.form = shape.form;
  args.gate_up = static_cast<__nv_bfloat16*>(g.gate_up);
  const cudaError_t error = product_args(Product::kGlu, plan,
                                         {.first = g.w1,
                                          .second = g.w3,
                                          .experts = shape.experts,
                                          .features = shape.inner,
                                          .k = shape.width,
                                          .x = g.x,
                                          .out = g.h},
                                         &args);
  if (error != cudaSuccess) return error;
  return g.gate_up != nullptr ? launch_glu_keep(args, stream) : launch_product<Product::kGlu>(args, stream);
}

}  // namespace godwit::kernels::cuda::sm90
