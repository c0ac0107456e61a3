#include "godwit/kernels/cuda/sm90/experts_gemm.cuh"
#include "godwit/kernels/cuda/sm90/experts_launch.cuh"

namespace godwit::kernels::cuda::sm90 {

cudaError_t launch_out_product(const ExpertPlan& plan, const MoeShape& shape, const void* w2, const void* h,
                               void* y, cudaStream_t stream) {
  ProductArgs args;
  const cudaError_t error = product_args(
      Product::kPlain, plan,
      {.first = w2, .experts = shape.experts, .features = shape.width, .k = shape.inner, .x = h, .out = y},
      &args);
  return error == cudaSuccess ? launch_product<Product::kPlain>(args, stream) : error;
}

}  // namespace godwit::kernels::cuda::sm90
