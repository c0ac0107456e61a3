// Cross-entropy of rows of fp32 logits (layer_gpu.h). A row of a large vocabulary (655 KB for 163,840) does
// not fit into one multiprocessor, but into the registers of a cluster of eight CTAs: each thread keeps some
// 40 of its logits, so they are read once, and the warps of all eight exchange their largest logit and sum of
// exponentials. Two CTAs a multiprocessor: one loads while another stores. Rows of small vocabularies take a
// CTA each, which reads them twice, the second time backwards, so that the end of the row still lies in L2;
// so do rows that do not fit even so.
#include <algorithm>

#include "godwit/kernels/cuda/sm90/rows.cuh"

namespace godwit::kernels::cuda {
namespace {

using namespace sm90;

constexpr int kShare = 8;  // CTAs a row
constexpr float kLog2e = 1.44269504f;
constexpr int kMaxRow = 40960;  // up to there the rows being read, two a multiprocessor, fit into L2

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

// To the same place in the shared memory of another CTA of the cluster.
__device__ __forceinline__ void store_at(const Sum* place, int rank, Sum s) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem_address(place)), "r"(rank));
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(s.top), "f"(s.sum) : "memory");
}
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ float top_of(const float4& x) {
  return fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w));
}
__device__ __forceinline__ float lane_top(float x) {
#pragma unroll
  for (int m = 16; m > 0; m /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, m));
  return x;
}

// The parts of all warps of the cluster, a row of lanes after the other.
template <int kParts>
__device__ __forceinline__ Sum join_parts(const Sum* parts, int lane) {
  Sum all{-INFINITY, 0.f}, mine[kParts / 32];
#pragma unroll
  for (int i = 0; i < kParts / 32; ++i) mine[i] = parts[i * 32 + lane], all.top = fmaxf(all.top, mine[i].top);
  all.top = lane_top(all.top);
#pragma unroll
  for (int i = 0; i < kParts / 32; ++i) all.sum += mine[i].sum * power(mine[i].top - all.top);
  all.sum = lane_sum(all.sum);
  return all;
}

// kThreads threads with kUnits float4 of a row each. A warp's exponentials are taken once, against the warp's
// largest logit, and corrected by one factor for the row's.
template <int kThreads, int kUnits>
__global__ void __cluster_dims__(kShare, 1, 1) __launch_bounds__(kThreads, 1024 / kThreads)
    loss_kernel(const __grid_constant__ SoftmaxLossParams p) {
  constexpr int kWarps = kThreads / 32;
  __shared__ Sum parts[2][kShare * kWarps];  // two rows take turns: one barrier a row is enough
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, share = blockIdx.x % kShare;
  const int units = p.vocabulary / 4, each = (units + kShare - 1) / kShare, first = share * each,
            count = max(0, min(units - first, each));
  int turn = 0;
  for (int64_t r = blockIdx.x / kShare; r < p.rows; r += gridDim.x / kShare, turn ^= 1) {
    const float* row = p.logits + r * p.vocabulary;
    const int64_t target = p.targets[r];
    float4 x[kUnits];
    float top = -INFINITY, sum = 0;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int u = i * kThreads + thread;
      x[i] = u < count ? __ldcs(reinterpret_cast<const float4*>(row) + first + u)
                       : make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i) top = fmaxf(top, top_of(x[i]));
    top = lane_top(top);
    const float shift = top == -INFINITY ? 0.f : top * kLog2e;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      x[i].x = exp2_approx(fmaf(x[i].x, kLog2e, -shift)), x[i].y = exp2_approx(fmaf(x[i].y, kLog2e, -shift));
      x[i].z = exp2_approx(fmaf(x[i].z, kLog2e, -shift)), x[i].w = exp2_approx(fmaf(x[i].w, kLog2e, -shift));
      sum += (x[i].x + x[i].y) + (x[i].z + x[i].w);
    }
    sum = lane_sum(sum);
    if (lane < kShare) store_at(&parts[turn][share * kWarps + warp], lane, {top, sum});
    cluster_barrier();
    const Sum all = join_parts<kShare * kWarps>(parts[turn], lane);
    if (share == 0 && thread == 0) p.nll[r] = target < 0 ? 0.f : logf(all.sum) + (all.top - row[target]);
    if (!p.d_logits) continue;
    uint2* const d_row = static_cast<uint2*>(p.d_logits) + r * units + first;
    if (target < 0) {  // zeros, whatever the logits are
      for (int u = thread; u < count; u += kThreads) d_row[u] = make_uint2(0, 0);
      continue;
    }
    const float weight = p.weights[r], scale = weight / all.sum * exp2_approx(shift - all.top * kLog2e);
    const int at = int(target) - 4 * (first + thread);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int u = i * kThreads + thread;
      float4 d = make_float4(x[i].x * scale, x[i].y * scale, x[i].z * scale, x[i].w * scale);
      if (uint32_t(at - 4 * i * kThreads) < 4) {
        const int c = at - 4 * i * kThreads;
        d.x -= c == 0 ? weight : 0.f, d.y -= c == 1 ? weight : 0.f;
        d.z -= c == 2 ? weight : 0.f, d.w -= c == 3 ? weight : 0.f;
      }
      if (u < count) __stcs(d_row + u, make_uint2(pack_bf16(d.x, d.y), pack_bf16(d.z, d.w)));
    }
  }
  cluster_barrier();  // nobody leaves while sums are being written to it
}

template <int kThreads, int kUnits>
cudaError_t launch(const SoftmaxLossParams& p) {
  const auto kernel = loss_kernel<kThreads, kUnits>;
  static const int resident = [&] {  // clusters at once
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension, cluster.val.clusterDim = {kShare, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(kShare), config.blockDim = dim3(kThreads);
    config.attrs = &cluster, config.numAttrs = 1;
    int count = 0;
    return cudaOccupancyMaxActiveClusters(&count, kernel, &config) == cudaSuccess ? std::max(1, count) : 1;
  }();
  kernel<<<unsigned(std::min<int64_t>(p.rows, resident) * kShare), kThreads, 0, p.stream>>>(p);
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
  const int each = (p.vocabulary / 4 + kShare - 1) / kShare;  // float4 a CTA
  if (p.vocabulary <= kMaxRow || each > 8 * 1024) return launch_rows<512>(p);
  if (each <= 4 * 512) return launch<512, 4>(p);
  return each <= 10 * 512 ? launch<512, 10>(p) : launch<1024, 8>(p);
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
