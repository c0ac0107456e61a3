// mla_decode over pages of bf16.
#include "godwit/kernels/cuda/sm90/mla_decode_group.cuh"

namespace godwit::kernels::cuda::sm90 {

cudaError_t launch_decode_groups(const DecodeArgs& a, int processors, cudaStream_t stream) {
  return launch_groups<false>(a, processors, stream);
}

}  // namespace godwit::kernels::cuda::sm90
