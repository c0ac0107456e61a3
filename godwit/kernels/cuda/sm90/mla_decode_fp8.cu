// mla_decode over pages of e4m3.
#include "godwit/kernels/cuda/sm90/mla_decode_group.cuh"

namespace godwit::kernels::cuda::sm90 {

cudaError_t launch_decode_fp8(const DecodeArgs& a, int processors, cudaStream_t stream) {
  return launch_groups<true>(a, processors, stream);
}

}  // namespace godwit::kernels::cuda::sm90
