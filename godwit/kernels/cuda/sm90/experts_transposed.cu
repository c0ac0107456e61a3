#include "godwit/kernels/cuda/sm90/experts_gemm.cuh"
#include "godwit/kernels/cuda/sm90/experts_launch.cuh"

namespace godwit::kernels::cuda::sm90 {

cudaError_t launch_transposed_product(const ExpertPlan& plan, int64_t experts, const TransposedWeights& w,
                                      const void* x, void* out, cudaStream_t stream) {
  ProductArgs args;
  const cudaError_t error = product_args(Product::kTransposed, plan,
                                         {.first = w.first,
                                          .second = w.second,
                                          .experts = experts,
                                          .features = w.columns,
                                          .k = w.rows,
                                          .x = x,
                                          .out = out},
                                         &args);
  return error == cudaSuccess ? launch_product<Product::kTransposed>(args, stream) : error;
}

}  // namespace godwit::kernels::cuda::sm90
