// Token-parallel part of the KDA chunk form: one CTA of 64 threads per chunk and head writes the operand
// block to the workspace, already in the layout the state pass wants in shared memory, with one bulk copy.
#include "godwit/kernels/cuda/sm90/kda_launch.cuh"
#include "godwit/kernels/cuda/sm90/kda_prepare.cuh"

namespace godwit::kernels::cuda::sm90 {
namespace {

template <bool kBounded>
__global__ void __launch_bounds__(64, 8) prepare_kernel(KdaInputs in, uint8_t* blocks) {
  __shared__ alignas(128) uint8_t block[Block::kBytes];
  __shared__ PrepareScratch scratch;
  const int head = blockIdx.x, thread = threadIdx.x;
  const int64_t slot = blockIdx.y + int64_t(blockIdx.z) * gridDim.y;
  if (slot >= kda_unit_count(in.T, in.N, kChunk)) return;
  const int n = find_sequence(in, slot, kChunk);
  const int64_t begin = sequence_begin(in, n), end = sequence_begin(in, n + 1);
  const int64_t token = begin + (slot - kda_first_unit(begin, n, kChunk)) * kChunk;
  if (token >= end) return;
  const int valid = end - token < kChunk ? int(end - token) : kChunk;
  prepare_chunk<kBounded>(in, token, valid, head, block, scratch, thread, 1);
  fence_async_shared();
  __syncthreads();
  if (thread == 0) {
    bulk_store(blocks + (slot * in.H + head) * Block::kBytes, block, Block::kBytes);
    bulk_commit();
    bulk_wait_read<0>();
  }
}

}  // namespace

cudaError_t launch_prepare(const KdaInputs& in, uint8_t* blocks, cudaStream_t stream) {
  const int64_t slots = kda_unit_count(in.T, in.N, kChunk);
  const dim3 grid(in.H, unsigned(slots < 32768 ? slots : 32768), unsigned((slots + 32767) / 32768));
  const auto kernel = in.gate_bound < 0.f ? prepare_kernel<true> : prepare_kernel<false>;
  kernel<<<grid, 64, 0, stream>>>(in, blocks);
  return cudaGetLastError();
}

}  // namespace godwit::kernels::cuda::sm90
