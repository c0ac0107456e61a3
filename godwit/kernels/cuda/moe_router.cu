// Router and plan in one kernel (moe_gpu.h). A warp takes a row; lane l holds the experts 128 u + 4 l + j as
// order-preserving integer keys of s + bias. The k+1 best of E:
//   1. the (k+1)-th largest of the 32 lane maxima bounds the (k+1)-th largest key from below;
//   2. the keys not below the bound, for unrelated experts about 1.4 (k+1), are gathered one a lane;
//   3. those are sorted by (key, lower index) across the lanes.
// Should there be more than 32 of them (equal scores, or the best all in few lanes), the row takes k+1
// rounds of "largest, lowest index" instead. Either way gives the same.
//
// The plan is a stable counting sort of the slots by expert. A CTA owns a run of tokens, its warps runs of
// that run; counts a warp are summed over warps in shared memory, over CTAs by one warp an expert after a
// grid barrier; after another each warp places its own slots in order. All counts are integers and the
// result is unique: it does not depend on the grid.
#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "godwit/kernels/moe_gpu.h"

namespace godwit::kernels::cuda {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr uint32_t kAll = 0xffffffffu;
constexpr uint32_t kLowestKey = 0x007fffffu;  // of -inf; 0 stands for no expert
constexpr int kMaxGrid = 1024;

struct PlanShared {
  uint16_t count[kWarps][kRouterMaxExperts];
  int32_t next[kWarps][kRouterMaxExperts];
  int32_t warp_sum[kWarps];
};
struct RouteShared {
  alignas(16) float bias[kRouterMaxExperts];
  uint64_t gathered[kWarps][32];
};
struct Shared {
  PlanShared plan;
  RouteShared route;
};

// e^-x with its argument's rounding made good: the product with log2(e) is carried in two parts.
__device__ __forceinline__ float sigmoid(float x) {
  constexpr float kLog2e = 1.44269504f, kLog2eRest = 1.92596303e-8f;
  const float t = -x * kLog2e, rest = fmaf(-x, kLog2e, -t) - x * kLog2eRest;
  float power;
  asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(t));
  const float e = fabsf(t) > 126.f ? power : fmaf(power, rest * 0.69314718f, power);
  return 1.f / (1.f + e);
}

__device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x);
  return x != x ? kLowestKey : bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u);
}
__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// Bitonic sort over the lanes, largest first.
template <class T>
__device__ __forceinline__ T sort_lanes(T x, int lane) {
#pragma unroll
  for (int size = 2; size <= 32; size *= 2)
#pragma unroll
    for (int step = size / 2; step > 0; step /= 2) {
      const T other = __shfl_xor_sync(kAll, x, step);
      const bool wants_larger = ((lane & size) == 0 || size == 32) == ((lane & step) == 0);
      x = wants_larger == (x > other) ? x : other;
    }
  return x;
}

// Key and index of the lane-th best, for lanes up to k.
struct Best {
  uint32_t key;
  int index;
};

template <int kUnits>
__device__ __noinline__ Best select_by_rounds(uint32_t (&key)[4 * kUnits], int k, int lane) {
  Best mine{0, 0};
  for (int round = 0; round <= k; ++round) {
    uint32_t top = 0, where = kAll;
#pragma unroll
    for (int i = 4 * kUnits - 1; i >= 0; --i) {
      const bool better = key[i] >= top && key[i] > 0;
      top = better ? key[i] : top;
      where = better ? uint32_t(128 * (i >> 2) + 4 * lane + (i & 3)) : where;
    }
    const uint32_t best = __reduce_max_sync(kAll, top);
    const uint32_t index = __reduce_min_sync(kAll, top == best ? where : kAll);
    if (lane == round) mine = {best, int(index)};
#pragma unroll
    for (int i = 0; i < 4 * kUnits; ++i)
      if (uint32_t(128 * (i >> 2) + 4 * lane + (i & 3)) == index) key[i] = 0;
  }
  return mine;
}

template <int kUnits>
__device__ __forceinline__ Best select(uint32_t (&key)[4 * kUnits], int k, uint64_t* gathered, int lane) {
  uint32_t top = key[0];
#pragma unroll
  for (int i = 1; i < 4 * kUnits; ++i) top = max(top, key[i]);
  const uint32_t bound = max(1u, __shfl_sync(kAll, sort_lanes(top, lane), k));
  int count = 0;
#pragma unroll
  for (int i = 0; i < 4 * kUnits; ++i) count += key[i] >= bound;
  int end = count;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int before = __shfl_up_sync(kAll, end, d);
    if (lane >= d) end += before;
  }
  const int total = __shfl_sync(kAll, end, 31);
  if (total > 32) return select_by_rounds<kUnits>(key, k, lane);
  uint64_t* to = gathered + end - count;
#pragma unroll
  for (int i = 0; i < 4 * kUnits; ++i)
    if (key[i] >= bound) *to++ = uint64_t(key[i]) << 32 | uint32_t(~(128 * (i >> 2) + 4 * lane + (i & 3)));
  __syncwarp();
  uint64_t mine = lane < total ? gathered[lane] : 0;
  __syncwarp();
  mine = sort_lanes(mine, lane);
  return {uint32_t(mine >> 32), int(~uint32_t(mine))};
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int m = 16; m > 0; m /= 2) x += __shfl_xor_sync(kAll, x, m);
  return x;
}

template <int kUnits>
__device__ __forceinline__ void load_row(float4 (&x)[kUnits], const RouterParams& p, int64_t token,
                                         int lane) {
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int e = 128 * u + 4 * lane;
    if (e < p.experts) x[u] = __ldcs(reinterpret_cast<const float4*>(p.logits + token * p.experts + e));
  }
}

// Routes one row whose logits are in x. Returns the lane's choice, -1 in lanes from k on.
template <int kUnits>
__device__ __forceinline__ int route_row(const RouterParams& p, const float4 (&x)[kUnits], int64_t token,
                                         RouteShared& shared, int warp, int lane) {
  uint32_t key[4 * kUnits];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int e = 128 * u + 4 * lane;
    const bool there = e < p.experts;
    const float4 b = *reinterpret_cast<const float4*>(shared.bias + (there ? e : 0));
    const float4 s = make_float4(sigmoid(x[u].x), sigmoid(x[u].y), sigmoid(x[u].z), sigmoid(x[u].w));
    if (p.scores && there) __stcs(reinterpret_cast<float4*>(p.scores + token * p.experts + e), s);
    key[4 * u] = there ? key_of(s.x + b.x) : 0, key[4 * u + 1] = there ? key_of(s.y + b.y) : 0;
    key[4 * u + 2] = there ? key_of(s.z + b.z) : 0, key[4 * u + 3] = there ? key_of(s.w + b.w) : 0;
  }
  const Best best = select<kUnits>(key, p.k, shared.gathered[warp], lane);
  const bool mine = lane < p.k;
  const float s = mine ? sigmoid(p.logits[token * p.experts + best.index]) : 0.f;
  const float total = warp_sum(s);
  if (mine) {
    p.chosen[token * p.k + lane] = best.index;
    p.weights[token * p.k + lane] = p.scale * (p.renormalize && p.k > 1 ? s / (total + 1e-20f) : s);
  }
  if (lane == p.k) p.cutoff[token] = p.k < p.experts ? value_of(best.key) : -INFINITY;
  return mine ? best.index : -1;
}

// The tokens of a warp: runs of runs, so that smaller numbers come first.
struct Run {
  int64_t begin, end;
};
__device__ __forceinline__ Run run_of(int64_t tokens, int warp) {
  const int64_t runs = int64_t(gridDim.x) * kWarps, length = (tokens + runs - 1) / runs;
  const int64_t begin = min(tokens, (int64_t(blockIdx.x) * kWarps + warp) * length);
  return {begin, min(tokens, begin + length)};
}

__device__ __forceinline__ void count_choice(PlanShared& shared, int warp, int expert, int experts) {
  if (uint32_t(expert) < uint32_t(experts)) ++shared.count[warp][expert];  // a row's choices are distinct
  __syncwarp();
}

// Exclusive sums of totals [E] into first[0 .. E], by the whole CTA.
__device__ __forceinline__ void scan_totals(const int32_t* totals, int experts, int32_t* first,
                                            int32_t* warp_sums) {
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  constexpr int kEach = kRouterMaxExperts / kThreads;
  int x[kEach], sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int e = thread * kEach + i;
    x[i] = sum;
    sum += e < experts ? totals[e] : 0;
  }
  int end = sum;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int before = __shfl_up_sync(kAll, end, d);
    if (lane >= d) end += before;
  }
  if (lane == 31) warp_sums[warp] = end;
  __syncthreads();
  int base = end - sum;
  for (int w = 0; w < warp; ++w) base += warp_sums[w];
#pragma unroll
  for (int i = 0; i < kEach; ++i) first[thread * kEach + i] = base + x[i];
  __syncthreads();
}

// The rest of the plan, once every warp has counted its tokens. workspace: totals [E], then counts [grid][E].
__device__ __forceinline__ void make_plan(const MoePlanParams& p, PlanShared& shared) {
  const auto grid = cooperative_groups::this_grid();
  int32_t* const totals = static_cast<int32_t*>(p.workspace);
  int32_t* const counts = totals + p.experts;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, E = p.experts;
  __syncthreads();
  for (int e = thread; e < E; e += kThreads) {
    int sum = 0;
    for (int w = 0; w < kWarps; ++w) {
      const int mine = shared.count[w][e];
      shared.next[w][e] = sum;  // slots of earlier warps
      sum += mine;
    }
    counts[int64_t(blockIdx.x) * E + e] = sum;
  }
  grid.sync();
  for (int e = blockIdx.x * kWarps + warp; e < E; e += gridDim.x * kWarps) {
    int carry = 0;
    for (int first = 0; first < int(gridDim.x); first += 32) {
      const int c = first + lane;
      const int mine = c < int(gridDim.x) ? __ldcg(counts + int64_t(c) * E + e) : 0;
      int end = mine;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int before = __shfl_up_sync(kAll, end, d);
        if (lane >= d) end += before;
      }
      if (c < int(gridDim.x)) __stcg(counts + int64_t(c) * E + e, carry + end - mine);
      carry += __shfl_sync(kAll, end, 31);
    }
    if (lane == 0) __stcg(totals + e, carry);
  }
  grid.sync();
  int32_t* const first = reinterpret_cast<int32_t*>(shared.count);  // its counts are spent
  scan_totals(totals, E, first, shared.warp_sum);
  for (int e = thread; e < E; e += kThreads) {
    const int base = first[e] + __ldcg(counts + int64_t(blockIdx.x) * E + e);
    for (int w = 0; w < kWarps; ++w) shared.next[w][e] += base;
    if (blockIdx.x == 0) p.plan.offsets[e] = first[e];
    if (blockIdx.x == 0 && e == E - 1) p.plan.offsets[E] = first[e] + totals[e];
  }
  __syncthreads();
  const Run run = run_of(p.tokens, warp);
  int expert = lane < p.k && run.begin < run.end ? __ldcg(p.chosen + run.begin * p.k + lane) : -1;
  for (int64_t token = run.begin; token < run.end; ++token) {
    const int following =
        lane < p.k && token + 1 < run.end ? __ldcg(p.chosen + (token + 1) * p.k + lane) : -1;
    if (uint32_t(expert) < uint32_t(E)) {
      const int row = shared.next[warp][expert]++, slot = int(token) * p.k + lane;
      p.plan.slot_of_row[row] = slot;
      p.plan.row_of_slot[slot] = row;
    }
    __syncwarp();
    expert = following;
  }
}

__device__ __forceinline__ void clear_counts(PlanShared& shared) {
  uint32_t* const words = reinterpret_cast<uint32_t*>(shared.count);
  for (int i = threadIdx.x; i < int(sizeof(shared.count) / 4); i += kThreads) words[i] = 0;
}

template <int kUnits, bool kPlan>
__global__ void __launch_bounds__(kThreads, 2) router_kernel(const __grid_constant__ RouterParams p) {
  extern __shared__ __align__(16) uint8_t dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  for (int e = threadIdx.x; e < p.experts; e += kThreads) shared.route.bias[e] = p.bias[e];
  if constexpr (kPlan) clear_counts(shared.plan);
  __syncthreads();
  const Run run = run_of(p.tokens, warp);
  float4 x[kUnits] = {}, ahead[kUnits] = {};
  if (run.begin < run.end) load_row(ahead, p, run.begin, lane);
  for (int64_t token = run.begin; token < run.end; ++token) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) x[u] = ahead[u];
    if (token + 1 < run.end) load_row(ahead, p, token + 1, lane);
    const int expert = route_row<kUnits>(p, x, token, shared.route, warp, lane);
    if constexpr (kPlan) count_choice(shared.plan, warp, expert, p.experts);
  }
  if constexpr (kPlan)
    make_plan({p.chosen, p.tokens, p.experts, p.k, p.plan, p.workspace, nullptr}, shared.plan);
}

__global__ void __launch_bounds__(kThreads, 2) plan_kernel(const __grid_constant__ MoePlanParams p) {
  extern __shared__ __align__(16) uint8_t dynamic[];
  PlanShared& shared = *reinterpret_cast<PlanShared*>(dynamic);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  clear_counts(shared);
  __syncthreads();
  const Run run = run_of(p.tokens, warp);
  for (int64_t token = run.begin; token < run.end; ++token)
    count_choice(shared, warp, lane < p.k ? p.chosen[token * p.k + lane] : -1, p.experts);
  make_plan(p, shared);
}

// CTAs that are on the device at once, at most kMaxGrid, and no more than there is work for.
template <class Kernel>
cudaError_t grid_size(Kernel kernel, size_t shared_bytes, int64_t tokens, int* grid) {
  cudaError_t e =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
  int device = 0, processors = 0, each = 0;
  if (e == cudaSuccess) e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (e == cudaSuccess)
    e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, kThreads, shared_bytes);
  *grid = int(std::clamp<int64_t>((tokens + kWarps - 1) / kWarps, 1,
                                  std::min<int64_t>(kMaxGrid, int64_t{processors} * each)));
  return e;
}

template <class Params>
cudaError_t launch_together(void (*kernel)(Params), Params p, size_t shared_bytes) {
  int grid = 0;
  const cudaError_t e = grid_size(kernel, shared_bytes, p.tokens, &grid);
  if (e != cudaSuccess) return e;
  if (p.tokens > int64_t{grid} * kWarps * 8191) return cudaErrorInvalidValue;  // counts are 16 bits wide
  void* arguments[] = {&p};
  return cudaLaunchCooperativeKernel(kernel, dim3(grid), dim3(kThreads), arguments, shared_bytes, p.stream);
}

template <int kUnits>
cudaError_t route(const RouterParams& p) {
  if (p.wants_plan) return launch_together(router_kernel<kUnits, true>, p, sizeof(Shared));
  const auto kernel = router_kernel<kUnits, false>;
  int grid = 0;
  const cudaError_t e = grid_size(kernel, sizeof(Shared), p.tokens, &grid);
  if (e != cudaSuccess) return e;
  kernel<<<grid, kThreads, sizeof(Shared), p.stream>>>(p);
  return cudaGetLastError();
}

// A warp a row: ds_i = scale (d_i - sum_j d_j p_j) / S with p = s / S, S = sum of the chosen s, or scale d_i.
__global__ void __launch_bounds__(kThreads) router_bwd_kernel(const __grid_constant__ RouterBwdParams p) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int64_t token = int64_t(blockIdx.x) * kWarps + warp;
  if (token >= p.tokens) return;
  float* const row = p.d_logits + token * p.experts;
  const bool mine = lane < p.k;
  const int expert = mine ? p.chosen[token * p.k + lane] : 0;
  const float s = mine ? p.scores[token * p.experts + expert] : 0.f;
  float d = mine ? p.scale * p.d_weights[token * p.k + lane] : 0.f;
  for (int e = 4 * lane; e < p.experts; e += 128)
    *reinterpret_cast<float4*>(row + e) = make_float4(0.f, 0.f, 0.f, 0.f);
  if (p.renormalize && p.k > 1) {
    const float total = warp_sum(s) + 1e-20f;
    d = (d - warp_sum(d * s) / total) / total;
  }
  __syncwarp();
  if (mine) row[expert] = d * s * (1.f - s);
}

}  // namespace

size_t moe_plan_workspace_bytes(int experts) {
  return size_t(kMaxGrid + 1) * experts * sizeof(int32_t);
}

int moe_router_fwd(const RouterParams& p) {
  if (p.tokens == 0 && !p.wants_plan) return cudaSuccess;
  if (p.experts > kRouterMaxExperts || p.experts % 4 != 0 || p.k > kRouterMaxChosen || p.k > p.experts)
    return cudaErrorInvalidValue;
  if (p.experts <= 128) return route<1>(p);
  if (p.experts <= 256) return route<2>(p);
  if (p.experts <= 512) return route<4>(p);
  if (p.experts <= 896) return route<7>(p);
  return route<8>(p);
}

int moe_router_bwd(const RouterBwdParams& p) {
  if (p.tokens == 0) return cudaSuccess;
  if (p.k > 32 || p.experts % 4 != 0) return cudaErrorInvalidValue;
  router_bwd_kernel<<<unsigned((p.tokens + kWarps - 1) / kWarps), kThreads, 0, p.stream>>>(p);
  return cudaGetLastError();
}

int moe_plan(const MoePlanParams& p) {
  if (p.experts > kRouterMaxExperts || p.k > 32) return cudaErrorInvalidValue;
  return launch_together(plan_kernel, p, sizeof(PlanShared));
}

}  // namespace godwit::kernels::cuda
