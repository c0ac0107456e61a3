#include "godwit/kernels/cuda/sm90/experts_gemm.cuh"
#include "godwit/kernels/cuda/sm90/experts_launch.cuh"

namespace godwit::kernels::cuda::sm90 {

cudaError_t launch_glu_keep(const ProductArgs& args, cudaStream_t stream) {
  return launch_product<Product::kGluKeep>(args, stream);
}

}  // namespace godwit::kernels::cuda::sm90
