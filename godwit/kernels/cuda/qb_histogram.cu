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

// Scores of one expert at kAhead tokens, and the tokens' cut-offs, which all lanes share.
struct Batch {
  float score[kAhead], cutoff[kAhead];
};
// kAll: every token is there. `row` points at the expert's score of the first token.
template <bool kAll>
__device__ __forceinline__ void load(Batch& batch, const HistogramParams& p, const float* row,
                                     int64_t token) {
#pragma unroll
  for (int i = 0; i < kAhead; ++i)
    batch.score[i] = kAll || token + i < p.tokens ? __ldcs(row + int64_t(i) * p.experts) : 0.f;
#pragma unroll
  for (int i = 0; i < kAhead; ++i)
    batch.cutoff[i] = kAll || token + i < p.tokens ? __ldg(p.cutoff + token + i) : 0.f;
}

__device__ __forceinline__ uint32_t smem_word(const void* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void add_one(uint32_t word) {
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(word), "r"(1) : "memory");
}

// Counts the batch. What a count costs is its instructions, so they are few: the bin is rounded down by the
// addition that also makes it an integer (2^23 has its ones in the last place of a float).
template <bool kAll, bool kLogits>
__device__ __forceinline__ void count(const Batch& batch, const HistogramParams& p, int64_t token,
                                      uint32_t mine) {
  constexpr float kInteger = 8388608.f;
  const float last = float(p.bins - 1);
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    float score = batch.score[i];
    if constexpr (kLogits) {
      float e;
      asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(-1.44269504f * score));
      asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(score) : "f"(1.f + e));
    }
    const float place = (batch.cutoff[i] - score - p.range_min) * p.bins_per_unit;
    const float bin = __fadd_rd(fminf(fmaxf(place, 0.f), last), kInteger);
    if (kAll || token + i < p.tokens)
      add_one(mine + (__float_as_uint(bin) - __float_as_uint(kInteger)) * (kExperts * 4));
  }
}

// A warp's tokens in batches of kAhead, the next batch's loads in flight.
template <bool kLogits>
__device__ __forceinline__ void count_tokens(const HistogramParams& p, int64_t token, int64_t step,
                                             int expert, uint32_t mine) {
  Batch now, next;
  const float* row = p.scores + token * p.experts + expert;
  const int64_t row_step = step * p.experts, full = p.tokens - kAhead;
  if (token <= full) load<true>(next, p, row, token);
  for (; token <= full; token += step, row += row_step) {
    now = next;
    if (token + step <= full) load<true>(next, p, row + row_step, token + step);
    count<true, kLogits>(now, p, token, mine);
  }
  if (token < p.tokens) {
    load<false>(now, p, row, token);
    count<false, kLogits>(now, p, token, mine);
  }
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
  const uint32_t mine = smem_word(counts) + lane * 4;
  const int64_t begin = int64_t(share * kWarps + warp) * kAhead, step = kShare * kWarps * kAhead;
  if (expert < p.experts) {
    if (p.from_logits)
      count_tokens<true>(p, begin, step, expert, mine);
    else
      count_tokens<false>(p, begin, step, expert, mine);
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
