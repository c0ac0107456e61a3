// Cross-entropy of rows of fp32 logits (layer_gpu.h). A row of a large vocabulary (655 KB for 163,840) does
// not fit into one multiprocessor, but into a cluster of eight CTAs, two a multiprocessor so that one can
// load while another stores: each keeps an eighth in shared memory, so the logits are read once, and the
// eight exchange their largest logit and sum of exponentials. Rows that do not fit even so are read twice,
// the second time backwards, so that the end of the row still lies in L2; so are those of small vocabularies,
// a CTA each.
#include <cooperative_groups.h>

#include <algorithm>

#include "godwit/kernels/cuda/sm90/rows.cuh"

namespace godwit::kernels::cuda {
namespace {

using namespace sm90;

constexpr int kThreads = 512, kWarps = kThreads / 32, kShare = 8;
constexpr float kLog2e = 1.44269504f;
constexpr int kMaxHeld = 28000;  // values in a CTA's shared memory
constexpr int kMaxRow = 40960;   // up to there the rows being read, two a multiprocessor, fit into L2

// The largest of some values and the sum of e^(x - largest).
struct Sum {
  float top, sum;
};
__device__ __forceinline__ float power(float x) {
  return exp2_approx(x * kLog2e);
}
__device__ __forceinline__ Sum join(Sum a, Sum b) {
  const float top = fmaxf(a.top, b.top);
  if (top == -INFINITY) return {top, 0.f};
  return {top, a.sum * power(a.top - top) + b.sum * power(b.top - top)};
}

struct LossShared {
  Sum warp[kWarps], share;
};

__device__ __forceinline__ Sum join_lanes(Sum x) {
#pragma unroll
  for (int m = 16; m > 0; m /= 2)
    x = join(x, {__shfl_xor_sync(kAllLanes, x.top, m), __shfl_xor_sync(kAllLanes, x.sum, m)});
  return x;
}

// Eight logits as two float4.
__device__ __forceinline__ Eight load_logits(const float* row, int unit) {
  const float4 a = __ldcg(reinterpret_cast<const float4*>(row) + 2 * unit),
               b = __ldcg(reinterpret_cast<const float4*>(row) + 2 * unit + 1);
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}
__device__ __forceinline__ Sum add(Sum s, const Eight& x) {
  float top = x.x[0];
#pragma unroll
  for (int i = 1; i < kVector; ++i) top = fmaxf(top, x.x[i]);
  if (top > s.top) s = {top, s.sum * power(s.top - top)};
#pragma unroll
  for (int i = 0; i < kVector; ++i) s.sum += power(x.x[i] - s.top);
  return s;
}

template <bool kHeld>
__global__ void __cluster_dims__(kShare, 1, 1) __launch_bounds__(kThreads, 2)
    loss_kernel(const __grid_constant__ SoftmaxLossParams p) {
  extern __shared__ __align__(16) float held[];
  __shared__ LossShared shared;
  const auto cluster = cooperative_groups::this_cluster();
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, share = blockIdx.x % kShare;
  const int units = p.vocabulary / kVector, each = (units + kShare - 1) / kShare, first = share * each,
            count = max(0, min(units - first, each));
  for (int64_t r = blockIdx.x / kShare; r < p.rows; r += gridDim.x / kShare) {
    const float* row = p.logits + r * p.vocabulary;
    const int64_t target = p.targets[r];
    uint4* const d_row = static_cast<uint4*>(p.d_logits) + r * units;
    if (target < 0) {  // the same in the whole cluster
      if (share == 0 && thread == 0) p.nll[r] = 0.f;
      for (int u = thread; u < count && p.d_logits; u += kThreads) d_row[first + u] = make_uint4(0, 0, 0, 0);
      continue;
    }
    Sum mine{-INFINITY, 0.f};
#pragma unroll 4
    for (int u = thread; u < count; u += kThreads) {
      const Eight x = load_logits(row, first + u);
      mine = add(mine, x);
      if constexpr (kHeld) {
        reinterpret_cast<float4*>(held)[2 * u] = make_float4(x.x[0], x.x[1], x.x[2], x.x[3]);
        reinterpret_cast<float4*>(held)[2 * u + 1] = make_float4(x.x[4], x.x[5], x.x[6], x.x[7]);
      }
    }
    mine = join_lanes(mine);
    if (lane == 0) shared.warp[warp] = mine;
    __syncthreads();
    if (warp == 0) {
      mine = join_lanes(lane < kWarps ? shared.warp[lane] : Sum{-INFINITY, 0.f});
      if (lane == 0) shared.share = mine;
    }
    cluster.sync();
    Sum all{-INFINITY, 0.f};
#pragma unroll
    for (int i = 0; i < kShare; ++i) all = join(all, *cluster.map_shared_rank(&shared.share, i));
    if (share == 0 && thread == 0) p.nll[r] = logf(all.sum) + (all.top - row[target]);
    if (p.d_logits) {
      const float weight = p.weights[r], scale = weight / all.sum;
      for (int i = thread; i < count; i += kThreads) {
        const int u = kHeld ? i : count - 1 - i;
        Eight x;
        if constexpr (kHeld) {
          const float4 a = reinterpret_cast<const float4*>(held)[2 * u],
                       b = reinterpret_cast<const float4*>(held)[2 * u + 1];
          x = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        } else {
          x = load_logits(row, first + u);
        }
        const int64_t at = target - int64_t(first + u) * kVector;
#pragma unroll
        for (int c = 0; c < kVector; ++c) x.x[c] = scale * power(x.x[c] - all.top) - (at == c ? weight : 0.f);
        __stcs(d_row + first + u, pack(x));
      }
    }
    cluster.sync();  // the sums are read before the next row's are written
  }
}

template <bool kHeld>
cudaError_t launch(const SoftmaxLossParams& p, size_t bytes) {
  const auto kernel = loss_kernel<kHeld>;
  int grid = 0;
  const cudaError_t e = resident_grid(kernel, kThreads, bytes, &grid);
  if (e != cudaSuccess) return e;
  const int64_t clusters = std::min<int64_t>(p.rows, std::max(1, grid / kShare));
  kernel<<<unsigned(clusters * kShare), kThreads, bytes, p.stream>>>(p);
  return cudaGetLastError();
}

// Rows of a small vocabulary: a CTA each, whose end still lies in L2 when it is read again for the gradient.
template <int kRowThreads>
__global__ void __launch_bounds__(kRowThreads, 1024 / kRowThreads)
    row_loss_kernel(const __grid_constant__ SoftmaxLossParams p) {
  __shared__ Sum sums[2][kRowThreads / 32];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, units = p.vocabulary / kVector;
  int turn = 0;  // alternates, so that sums are not written before the last ones are read
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    const float* const row = p.logits + r * p.vocabulary;
    const int64_t target = p.targets[r];
    uint4* const d_row = static_cast<uint4*>(p.d_logits) + r * units;
    if (target < 0) {
      if (thread == 0) p.nll[r] = 0.f;
      for (int u = thread; u < units && p.d_logits; u += kRowThreads) d_row[u] = make_uint4(0, 0, 0, 0);
      continue;
    }
    Sum mine{-INFINITY, 0.f};
#pragma unroll 4
    for (int u = thread; u < units; u += kRowThreads) mine = add(mine, load_logits(row, u));
    mine = join_lanes(mine);
    if (lane == 0) sums[turn][warp] = mine;
    __syncthreads();
    const Sum all = join_lanes(lane < kRowThreads / 32 ? sums[turn][lane] : Sum{-INFINITY, 0.f});
    turn ^= 1;
    if (thread == 0) p.nll[r] = logf(all.sum) + (all.top - row[target]);
    if (!p.d_logits) continue;
    const float weight = p.weights[r], scale = weight / all.sum;
#pragma unroll 2
    for (int i = thread; i < units; i += kRowThreads) {
      const int u = units - 1 - i;
      Eight x = load_logits(row, u);
      const int64_t at = target - int64_t(u) * kVector;
#pragma unroll
      for (int c = 0; c < kVector; ++c) x.x[c] = scale * power(x.x[c] - all.top) - (at == c ? weight : 0.f);
      __stcs(d_row + u, pack(x));
    }
  }
}

template <int kRowThreads>
cudaError_t launch_rows(const SoftmaxLossParams& p) {
  int grid = 0;
  const cudaError_t e = resident_grid(row_loss_kernel<kRowThreads>, kRowThreads, 0, &grid);
  if (e != cudaSuccess) return e;
  row_loss_kernel<kRowThreads><<<unsigned(std::min<int64_t>(p.rows, grid)), kRowThreads, 0, p.stream>>>(p);
  return cudaGetLastError();
}

template <bool kBf16>
__global__ void __launch_bounds__(256) scaled_kernel(const __grid_constant__ ScaledParams p) {
  const float factor = *p.factor;
  const int64_t units = p.n / kVector, step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t u = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; u < units; u += step) {
    Eight x;
    if constexpr (kBf16) {
      x = unpack(load_unit(p.x.data, u));
    } else {
      const float4 a = __ldcs(static_cast<const float4*>(p.x.data) + 2 * u),
                   b = __ldcs(static_cast<const float4*>(p.x.data) + 2 * u + 1);
      x = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    }
#pragma unroll
    for (int c = 0; c < kVector; ++c) x.x[c] *= factor;
    store_unit(p.out, u, x);
  }
}

}  // namespace

int softmax_loss(const SoftmaxLossParams& p) {
  if (p.rows == 0) return cudaSuccess;
  if (p.vocabulary % kVector != 0) return cudaErrorInvalidValue;
  if (p.vocabulary <= 4096) return launch_rows<128>(p);
  if (p.vocabulary <= kMaxRow) return launch_rows<512>(p);
  const int each = (p.vocabulary / kVector + kShare - 1) / kShare * kVector;
  return p.d_logits && each <= kMaxHeld ? launch<true>(p, size_t(each) * sizeof(float)) : launch<false>(p, 0);
}

int scaled(const ScaledParams& p) {
  if (p.n == 0) return cudaSuccess;
  if (p.n % kVector != 0) return cudaErrorInvalidValue;
  const unsigned grid = unsigned(std::min<int64_t>((p.n / kVector + 255) / 256, 132 * 64));
  if (p.x.bf16)
    scaled_kernel<true><<<grid, 256, 0, p.stream>>>(p);
  else
    scaled_kernel<false><<<grid, 256, 0, p.stream>>>(p);
  return cudaGetLastError();
}

}  // namespace godwit::kernels::cuda
