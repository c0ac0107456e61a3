// Histogram of required biases (moe_gpu.h). A cluster of four CTAs owns 32 experts: lane l counts for expert
// l in shared memory at word bin * 32 + l, so a warp's 32 counts fall into 32 banks. Each CTA takes a share
// of the tokens; at the end each adds a quarter of the bins of all four, read through the cluster's shared
// memory, to the counts: every word of them has one writer.
#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include "godwit/kernels/moe_gpu.h"

namespace godwit::kernels::cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32, kShare = 4, kExperts = 32, kAhead = 8;

// Scores of one expert at some tokens, and the tokens' cut-offs.
struct Batch {
  float score[kAhead], cutoff[kAhead];
};
__device__ __forceinline__ void load(Batch& batch, const HistogramParams& p, int64_t from, int64_t step,
                                     int expert, bool there) {
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const int64_t token = from + i * step;
    const bool valid = there && token < p.tokens;
    batch.score[i] = valid ? __ldcs(p.scores + token * p.experts + expert) : 0.f;
    batch.cutoff[i] = valid ? __ldg(p.cutoff + token) : 0.f;
  }
}

__device__ __forceinline__ uint32_t smem_word(const void* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void add_one(uint32_t word) {
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(word), "r"(1) : "memory");
}

__global__ void __cluster_dims__(kShare, 1, 1) __launch_bounds__(kThreads, 1)
    histogram_kernel(const __grid_constant__ HistogramParams p) {
  extern __shared__ __align__(16) uint32_t counts[];  // [bins][32]
  const auto cluster = cooperative_groups::this_cluster();
  const int share = blockIdx.x, first = blockIdx.y * kExperts, warp = threadIdx.x >> 5,
            lane = threadIdx.x & 31, expert = first + lane;
  const int words = p.bins * kExperts;
  for (int i = threadIdx.x; i < words; i += kThreads) counts[i] = 0;
  __syncthreads();
  const bool there = expert < p.experts;
  const float last = float(p.bins - 1);
  const uint32_t mine = smem_word(counts) + lane * 4;
  constexpr int64_t kStep = kShare * kWarps;
  Batch now, next;
  int64_t from = share * kWarps + warp;
  load(next, p, from, kStep, expert, there);
  for (; from < p.tokens; from += kStep * kAhead) {
    now = next;
    load(next, p, from + kStep * kAhead, kStep, expert, there);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const float score = p.from_logits ? __fdividef(1.f, 1.f + __expf(-now.score[i])) : now.score[i];
      const float place = floorf((now.cutoff[i] - score - p.range_min) * p.bins_per_unit);
      const int bin = int(fminf(fmaxf(place, 0.f), last));
      if (there && from + i * kStep < p.tokens) add_one(mine + bin * (kExperts * 4));
    }
  }
  cluster.sync();
  const uint32_t* part[kShare];
#pragma unroll
  for (int i = 0; i < kShare; ++i) part[i] = cluster.map_shared_rank(counts, i);
  // Eight bins of four experts a warp: four banks at once, and 64 bytes of counts in a run.
  const int blocks = (p.bins + 7) / 8;
  for (int b = share * kWarps + warp; b < blocks * (kExperts / 4); b += kShare * kWarps) {
    const int e = b % (kExperts / 4) * 4 + (lane >> 3), bin = b / (kExperts / 4) * 8 + (lane & 7);
    if (first + e >= p.experts || bin >= p.bins) continue;
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kShare; ++i) sum += part[i][bin * kExperts + e];
    if (sum) p.counts[int64_t(first + e) * p.bins + bin] += sum;
  }
  cluster.sync();  // nobody leaves while its shared memory is being read
}

}  // namespace

int qb_histogram(const HistogramParams& p) {
  if (p.tokens == 0 || p.experts == 0) return cudaSuccess;
  if (p.bins > kHistogramMaxBins || p.tokens >= int64_t{1} << 32) return cudaErrorInvalidValue;
  const size_t bytes = size_t(p.bins) * kExperts * sizeof(uint32_t);
  const cudaError_t e =
      cudaFuncSetAttribute(histogram_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
  if (e != cudaSuccess) return e;
  histogram_kernel<<<dim3(kShare, (p.experts + kExperts - 1) / kExperts), kThreads, bytes, p.stream>>>(p);
  return cudaGetLastError();
}

}  // namespace godwit::kernels::cuda
