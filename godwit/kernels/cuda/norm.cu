// RMS norm, plain and with an output gate, forward and backward (layer_gpu.h). With x^ = x r, r = (mean x^2 +
// eps)^-1/2, s = sigmoid(gate), h = dy s weight:
//   y = x^ weight s      dx = r (h - x^ mean(h x^))      dgate = dy x^ weight s (1 - s)
//   dweight = sum over rows of dy s x^
// A row is read once and stays in registers: a group of 16 or 32 lanes has a narrow one (up to 512), a whole
// CTA a wide one. Groups walk over rows, with the next row's loads in flight; each thread sums its channels
// of dweight on the way, a CTA adds its groups, and a second kernel adds the CTAs, all in a fixed order.
#include <algorithm>

#include "godwit/kernels/cuda/sm90/rows.cuh"

namespace godwit::kernels::cuda {
namespace {

using namespace sm90;

constexpr int kNarrowThreads = 256;
constexpr int kMaxThreads = kNormMaxWidth / kVector;
constexpr int kMaxGrid = 1024;  // of the backward: it sizes the workspace

// Sum over the group's threads, the same in each; a CTA-wide group alternates between two buffers, so one
// barrier serves.
template <int kGroup>
__device__ __forceinline__ float group_sum(float x, float (*part)[32], int round) {
  x = lane_sum < kGroup == 0 ? 32 : kGroup > (x);
  if constexpr (kGroup > 0) return x;
  const int warps = blockDim.x / 32, lane = threadIdx.x & 31;
  if (lane == 0) part[round & 1][threadIdx.x / 32] = x;
  __syncthreads();
  return lane_sum(lane < warps ? part[round & 1][lane] : 0.f);
}

__device__ __forceinline__ float sigmoid(float x) {
  return __fdividef(1.f, 1.f + exp2_approx(-1.44269504f * x));
}

// Vectors of x and, where there are, gate and dy of a row, as they came.
template <int kVectors>
struct RawRow {
  uint4 x[kVectors], gate[kVectors], dy[kVectors];
};

template <int kVectors, bool kGated, bool kBackward>
__device__ __forceinline__ void load_row(RawRow<kVectors>& raw, const NormParams& p, int64_t row, int lane,
                                         int group) {
  const int units = p.width / kVector;
  const int64_t x_units = p.x_stride ? p.x_stride / kVector : units;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int unit = lane + i * group;
    const bool read = row < p.rows && unit < units;
    const int64_t at = read ? row * units + unit : 0;
    const uint4 none = make_uint4(0, 0, 0, 0);
    raw.x[i] = read ? load_unit(p.x, row * x_units + unit) : none;
    if constexpr (kGated) raw.gate[i] = read ? load_unit(p.gate, at) : none;
    if constexpr (kBackward) raw.dy[i] = read ? load_unit(p.dy, at) : none;
  }
}

// kGroup lanes a row with kVectors vectors each; 0: the whole CTA.
template <int kGroup, int kVectors, bool kGated, bool kBackward>
__global__ void __launch_bounds__(kGroup ? kNarrowThreads : kMaxThreads / kVectors)
    norm_kernel(const __grid_constant__ NormParams p) {
  extern __shared__ float dweights[];  // [groups][D] (backward, narrow)
  __shared__ float part[2][32];
  const int group = kGroup ? kGroup : blockDim.x, groups = blockDim.x / group, mine = threadIdx.x / group,
            lane = threadIdx.x % group, units = p.width / kVector;
  Eight w[kVectors], dw[kVectors] = {};
#pragma unroll
  for (int i = 0; i < kVectors; ++i)
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      const int at = (lane + i * group) * kVector + c;
      w[i].x[c] = at < p.width ? weight_at(p.weight, at) : 0.f;
    }
  // Lanes of a warp take part in its sums to the last: all groups make the same number of rounds.
  const int64_t all = int64_t(gridDim.x) * groups, rounds = (p.rows + all - 1) / all;
  int64_t row = int64_t(blockIdx.x) * groups + mine;
  RawRow<kVectors> ahead;
  load_row<kVectors, kGated, kBackward>(ahead, p, row, lane, group);
  for (int64_t round = 0; round < rounds; ++round, row += all) {
    const bool there = row < p.rows;
    Eight x[kVectors], gate[kVectors], dy[kVectors];
    float square = 0.f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      x[i] = unpack(ahead.x[i]);
      if constexpr (kGated) gate[i] = unpack(ahead.gate[i]);
      if constexpr (kBackward) dy[i] = unpack(ahead.dy[i]);
    }
    load_row<kVectors, kGated, kBackward>(ahead, p, row + all, lane, group);
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
#pragma unroll
      for (int c = 0; c < kVector; ++c) square = fmaf(x[i].x[c], x[i].x[c], square);
    const float r = rsqrtf(group_sum<kGroup>(square, part, 0) / float(p.width) + p.eps);
    float along = 0.f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        const float s = kGated ? sigmoid(gate[i].x[c]) : 1.f;
        x[i].x[c] *= r;
        if constexpr (kBackward) {
          const float open = dy[i].x[c] * s;  // dy s
          dw[i].x[c] = fmaf(open, x[i].x[c], dw[i].x[c]);
          dy[i].x[c] = open * w[i].x[c];  // h
          along = fmaf(dy[i].x[c], x[i].x[c], along);
          if constexpr (kGated) gate[i].x[c] = dy[i].x[c] * x[i].x[c] * (1.f - s);
        } else {
          x[i].x[c] *= w[i].x[c] * s;
        }
      }
    float mean = 0.f;
    if constexpr (kBackward)
      mean = group_sum<kGroup>(along, part, 1) / float(p.width);
    else if constexpr (kGroup == 0)
      __syncthreads();  // the sums are read before the next row's are written
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int unit = lane + i * group;
      if (!there || unit >= units) continue;
      if constexpr (kBackward) {
#pragma unroll
        for (int c = 0; c < kVector; ++c) dy[i].x[c] = r * fmaf(-mean, x[i].x[c], dy[i].x[c]);
        store_unit(p.dx, row * units + unit, dy[i]);
        if constexpr (kGated) store_unit(p.dgate, row * units + unit, gate[i]);
      } else {
        store_unit(p.y, row * units + unit, x[i]);
      }
    }
  }
  if constexpr (kBackward) {
    float* const out = static_cast<float*>(p.workspace) + int64_t(blockIdx.x) * p.width;
    float* const to = kGroup ? dweights + mine * p.width : out;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (lane + i * group >= units) continue;
      float4* const at = reinterpret_cast<float4*>(to) + 2 * (lane + i * group);
      at[0] = make_float4(dw[i].x[0], dw[i].x[1], dw[i].x[2], dw[i].x[3]);
      at[1] = make_float4(dw[i].x[4], dw[i].x[5], dw[i].x[6], dw[i].x[7]);
    }
    if constexpr (kGroup > 0) {
      __syncthreads();
      for (int c = threadIdx.x; c < p.width; c += blockDim.x) {
        float sum = 0.f;
        for (int g = 0; g < groups; ++g) sum += dweights[g * p.width + c];
        out[c] = sum;
      }
    }
  }
}

__global__ void __launch_bounds__(256)
    weight_gradient_kernel(const __grid_constant__ NormParams p, int parts) {
  __shared__ float part[8][32];
  const int lane = threadIdx.x & 31, group = threadIdx.x >> 5, c = blockIdx.x * 32 + lane;
  float sum = 0.f;
  if (c < p.width)
    for (int i = group; i < parts; i += 8)
      sum += static_cast<const float*>(p.workspace)[int64_t(i) * p.width + c];
  part[group][lane] = sum;
  __syncthreads();
  if (group > 0 || c >= p.width) return;
  for (int g = 1; g < 8; ++g) sum += part[g][lane];
  write_weight(p.dweight, c, sum);
}

template <int kGroup, int kVectors, bool kGated, bool kBackward>
cudaError_t launch(const NormParams& p) {
  const auto kernel = norm_kernel<kGroup, kVectors, kGated, kBackward>;
  const int units = p.width / kVector;
  const int threads = kGroup ? kNarrowThreads : (units + 32 * kVectors - 1) / (32 * kVectors) * 32;
  const int groups = kGroup ? threads / kGroup : 1;
  const size_t bytes = kBackward && kGroup ? size_t(groups) * p.width * sizeof(float) : 0;
  int grid = 0;
  cudaError_t e = resident_grid(kernel, threads, bytes, &grid);
  if (e != cudaSuccess) return e;
  grid = int(std::min<int64_t>((p.rows + groups - 1) / groups, std::min(grid, kMaxGrid)));
  kernel<<<grid, threads, bytes, p.stream>>>(p);
  e = cudaGetLastError();
  if (!kBackward || e != cudaSuccess) return e;
  weight_gradient_kernel<<<(p.width + 31) / 32, 256, 0, p.stream>>>(p, grid);
  return cudaGetLastError();
}

template <bool kGated, bool kBackward>
int launch_by_width(const NormParams& p) {
  if (p.rows == 0) return cudaSuccess;
  if (p.width % kVector != 0 || p.x_stride % kVector != 0 || p.width == 0 || p.width > kNormMaxWidth)
    return cudaErrorInvalidValue;
  if (p.width <= 128) return launch<16, 1, kGated, kBackward>(p);
  if (p.width <= 256) return launch<32, 1, kGated, kBackward>(p);
  if (p.width <= 512) return launch<32, 2, kGated, kBackward>(p);
  // Two CTAs a multiprocessor hide each other's barriers; the backward has not the registers for it.
  if (!kBackward && p.width > 2048) return launch<0, 2, kGated, false>(p);
  return launch<0, 1, kGated, kBackward>(p);
}

}  // namespace

int rms_norm_fwd(const NormParams& p) {
  return p.gate ? launch_by_width<true, false>(p) : launch_by_width<false, false>(p);
}
size_t rms_norm_bwd_workspace_bytes(const NormParams& p) {
  return size_t(kMaxGrid) * p.width * sizeof(float);
}
int rms_norm_bwd(const NormParams& p) {
  return p.gate ? launch_by_width<true, true>(p) : launch_by_width<false, true>(p);
}

}  // namespace godwit::kernels::cuda
