// A control for compute-sanitizer's racecheck: the smallest program with the pattern of the KDA state pass,
// that is a ring of stages filled by bulk copies, a `full` mbarrier that the copy completes and an `empty`
// one on which every warp arrives after its last read. It has no race, and prints whether its sums are right;
// a hazard that the tool reports here is the tool's.
//     nvcc -std=c++20 -gencode=arch=compute_90a,code=sm_90a -I. tests/cuda/racecheck_control.cu -o control
//     compute-sanitizer --tool racecheck ./control
#include <cstdio>
#include <vector>

#include "godwit/kernels/cuda/sm90/ptx.cuh"

using namespace godwit::kernels::cuda::sm90;

namespace {

constexpr int kStages = 2, kWarps = 4, kWords = 128, kChunks = 64;

__global__ void ring(const uint32_t* in, uint32_t* out) {
  __shared__ alignas(128) uint32_t stage[kStages][kWords];
  __shared__ alignas(8) uint64_t full[kStages], empty[kStages];
  const int lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) mbarrier_init(&full[s], 1), mbarrier_init(&empty[s], kWarps);
    mbarrier_init_fence();
  }
  __syncthreads();
  const auto fetch = [&](int c) {
    if (threadIdx.x != 0 || c >= kChunks) return;
    const int s = c % kStages;
    if (c >= kStages) mbarrier_wait(&empty[s], (c / kStages - 1) & 1);
    mbarrier_arrive_expect(&full[s], kWords * 4);
    bulk_load(stage[s], in + c * kWords, kWords * 4, &full[s]);
  };
  fetch(0);
  uint32_t sum = 0;
  for (int c = 0; c < kChunks; ++c) {
    fetch(c + 1);
    const int s = c % kStages;
    mbarrier_wait(&full[s], (c / kStages) & 1);
    sum += stage[s][threadIdx.x];
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&empty[s]);
  }
  out[threadIdx.x] = sum;
}

}  // namespace

int main() {
  std::vector<uint32_t> host(kChunks * kWords), sums(kWords);
  for (size_t i = 0; i < host.size(); ++i) host[i] = uint32_t(i * 2654435761u);
  uint32_t *in, *out;
  cudaMalloc(&in, host.size() * 4), cudaMalloc(&out, sums.size() * 4);
  cudaMemcpy(in, host.data(), host.size() * 4, cudaMemcpyHostToDevice);
  ring<<<1, kWarps * 32>>>(in, out);
  cudaMemcpy(sums.data(), out, sums.size() * 4, cudaMemcpyDeviceToHost);
  bool right = cudaGetLastError() == cudaSuccess;
  for (int i = 0; i < kWords; ++i) {
    uint32_t want = 0;
    for (int c = 0; c < kChunks; ++c) want += host[c * kWords + i];
    right = right && sums[i] == want;
  }
  std::printf(right ? "sums right\n" : "SUMS WRONG\n");
  return !right;
}
