// The router (moe_gpu.h). A warp takes a row; lane l holds s + bias of the experts
// 128 u + 4 l + j. The k+1 best of E:
//   1. the (k+1)-th largest of the 32 lane maxima bounds the (k+1)-th largest value from below;
//   2. the experts not below the bound, for unrelated ones about 1.4 (k+1), are gathered one a lane, and the
//      lane computes its expert's score again, for its weight;
//   3. each lane counts the ones before its own by (value, lower index): that is its place.
// Should there be more than 32 of them (equal scores, or the best all in few lanes) or too few (NaN, which
// ranks as -inf), the row takes k+1 rounds of "largest, lowest index" instead. Either way gives the same.
#include <cuda_runtime.h>

#include <algorithm>

#include "godwit/kernels/moe_gpu.h"

namespace godwit::kernels::cuda {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr uint32_t kAll = 0xffffffffu;
constexpr float kTaken = INFINITY;  // no value is: scores are at most 1, biases finite

struct RouteShared {
  alignas(16) float bias[kRouterMaxExperts];
  alignas(16) uint64_t order[kWarps][32];
  uint16_t gathered[kWarps][32];
};

// Within 7.5e-8 |x| (the roundings of log2(e) and of x log2(e)) and two units in the last place. NaN stays
// NaN.
__device__ __forceinline__ float sigmoid(float x) {
  float e, s;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(-1.44269504f * x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.f + e));
  return s;
}

// Orders as the floats do.
__device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u);
}

// The lane-th largest of the lanes' values: a bitonic sort.
__device__ __forceinline__ float sort_lanes(float x, int lane) {
#pragma unroll
  for (int size = 2; size <= 32; size *= 2)
#pragma unroll
    for (int step = size / 2; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(kAll, x, step);
      const bool larger = ((lane & size) == 0 || size == 32) == ((lane & step) == 0);
      x = larger ? fmaxf(x, other) : fminf(x, other);
    }
  return x;
}

// Inclusive sums over the lanes.
__device__ __forceinline__ int scan_lanes(int x, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int before = __shfl_up_sync(kAll, x, d);
    if (lane >= d) x += before;
  }
  return x;
}

// A lane's expert among the k+1 best (or beyond: place > k), its value s + bias and its score.
struct Candidate {
  int place, expert;
  float value, score;
};

__device__ __forceinline__ void evaluate(Candidate& c, const RouterParams& p, int64_t token,
                                         const float* bias) {
  c.score = sigmoid(p.logits[token * p.experts + c.expert]);
  c.value = c.score + bias[c.expert];
}

// Lane i takes the i-th best. A value that is no number counts as -inf, unless there is no such expert.
template <int kUnits>
__device__ __noinline__ int select_by_rounds(float (&value)[4 * kUnits], int experts, int k, int lane) {
  int mine = 0;
  for (int round = 0; round <= k && round < experts; ++round) {
    uint32_t top = 0, where = kAll;
#pragma unroll
    for (int i = 4 * kUnits - 1; i >= 0; --i) {
      const uint32_t expert = 128 * (i >> 2) + 4 * lane + (i & 3);
      const uint32_t key = value[i] != value[i] ? key_of(-INFINITY) : key_of(value[i]);
      if (expert < uint32_t(experts) && key >= top && value[i] != kTaken) top = key, where = expert;
    }
    const uint32_t best = __reduce_max_sync(kAll, top);
    const uint32_t expert = __reduce_min_sync(kAll, top == best ? where : kAll);
    if (lane == round) mine = int(expert);
#pragma unroll
    for (int i = 0; i < 4 * kUnits; ++i)
      if (uint32_t(128 * (i >> 2) + 4 * lane + (i & 3)) == expert) value[i] = kTaken;
  }
  return mine;
}

template <int kUnits>
__device__ __forceinline__ Candidate select(const float (&value)[4 * kUnits], const RouterParams& p,
                                            int64_t token, RouteShared& shared, int warp, int lane) {
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < 4 * kUnits; ++i) top = fmaxf(top, value[i]);
  const float bound = __shfl_sync(kAll, sort_lanes(top, lane), p.k);
  uint32_t hits = 0;
#pragma unroll
  for (int i = 0; i < 4 * kUnits; ++i)
    if (value[i] >= bound) hits |= 1u << i;
  const int end = scan_lanes(__popc(hits), lane), total = __shfl_sync(kAll, end, 31);
  Candidate c{32, 0, 0.f, 0.f};
  if (total > 32 || total < min(p.k + 1, p.experts)) {
    float copy[4 * kUnits];  // the call wants an address, and the values are to stay in registers
#pragma unroll
    for (int i = 0; i < 4 * kUnits; ++i) copy[i] = value[i];
    c.expert = select_by_rounds<kUnits>(copy, p.experts, p.k, lane);
    evaluate(c, p, token, shared.bias);
    if (lane <= p.k && lane < p.experts) c.place = lane;
    return c;
  }
  uint16_t* to = shared.gathered[warp] + end - __popc(hits);
  for (; hits != 0; hits &= hits - 1) {
    const int i = __ffs(int(hits)) - 1;
    *to++ = uint16_t(128 * (i >> 2) + 4 * lane + (i & 3));
  }
  __syncwarp();
  uint64_t mine = 0;
  if (lane < total) {
    c.expert = shared.gathered[warp][lane];
    evaluate(c, p, token, shared.bias);
    mine = uint64_t(key_of(c.value)) << 32 | uint32_t(~c.expert);
  }
  shared.order[warp][lane] = mine;
  __syncwarp();
  int before = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) before += shared.order[warp][i] > mine;
  if (lane < total) c.place = before;
  __syncwarp();
  return c;
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

// Routes one row whose logits are in x.
template <int kUnits>
__device__ __forceinline__ void route_row(const RouterParams& p, const float4 (&x)[kUnits], int64_t token,
                                          RouteShared& shared, int warp, int lane) {
  float value[4 * kUnits];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int e = 128 * u + 4 * lane;
    const float4 b = *reinterpret_cast<const float4*>(shared.bias + e);  // NaN beyond the last expert
    const float4 s = make_float4(sigmoid(x[u].x), sigmoid(x[u].y), sigmoid(x[u].z), sigmoid(x[u].w));
    if (p.scores && e < p.experts) __stcs(reinterpret_cast<float4*>(p.scores + token * p.experts + e), s);
    value[4 * u] = s.x + b.x, value[4 * u + 1] = s.y + b.y;
    value[4 * u + 2] = s.z + b.z, value[4 * u + 3] = s.w + b.w;
  }
  const Candidate c = select<kUnits>(value, p, token, shared, warp, lane);
  const bool mine = c.place < p.k;
  const float total = warp_sum(mine ? c.score : 0.f);
  if (mine) {
    p.chosen[token * p.k + c.place] = c.expert;
    p.weights[token * p.k + c.place] =
        p.scale * (p.renormalize && p.k > 1 ? c.score / (total + 1e-20f) : c.score);
  }
  if (c.place == p.k) p.cutoff[token] = c.value == c.value ? c.value : -INFINITY;
  if (lane == 0 && p.k == p.experts) p.cutoff[token] = -INFINITY;
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

template <int kUnits>
__global__ void __launch_bounds__(kThreads, 3) router_kernel(const __grid_constant__ RouterParams p) {
  __shared__ RouteShared shared;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  for (int e = threadIdx.x; e < kRouterMaxExperts; e += kThreads)
    shared.bias[e] = e < p.experts ? p.bias[e] : NAN;
  __syncthreads();
  const Run run = run_of(p.tokens, warp);
  float4 x[kUnits] = {}, ahead[kUnits] = {};
  if (run.begin < run.end) load_row(ahead, p, run.begin, lane);
  for (int64_t token = run.begin; token < run.end; ++token) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) x[u] = ahead[u];
    if (token + 1 < run.end) load_row(ahead, p, token + 1, lane);
    route_row<kUnits>(p, x, token, shared, warp, lane);
  }
}

// CTAs that are on the device at once, and no more than there is work for.
template <int kUnits>
cudaError_t route(const RouterParams& p) {
  const auto kernel = router_kernel<kUnits>;
  int device = 0, processors = 0, each = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (e == cudaSuccess) e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, kThreads, 0);
  if (e != cudaSuccess) return e;
  const int64_t grid = std::clamp<int64_t>((p.tokens + kWarps - 1) / kWarps, 1, int64_t{processors} * each);
  kernel<<<unsigned(grid), kThreads, 0, p.stream>>>(p);
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
  const float s = mine ? sigmoid(p.logits[token * p.experts + expert]) : 0.f;
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

int moe_router_fwd(const RouterParams& p) {
  if (p.tokens == 0) return cudaSuccess;
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

}  // namespace godwit::kernels::cuda
