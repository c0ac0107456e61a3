// Attention Residuals mix, forward and backward (layer_gpu.h), per token over S sources v_s [D]:
//   r_s = (mean v_s^2 + eps)^-1/2   score_s = r_s sum_c key_c v_sc   key = norm_weight query
//   a = softmax(score)              out = sum_s a_s v_s
// and backward, with p_s = sum_c d_out_c v_sc and d_s = a_s (p_s - sum_j a_j p_j) the score's gradient:
//   d_v_s = a_s d_out + d_s r_s key - d_s r_s^2 score_s / D v_s      d_key = sum over tokens, s of d_s r_s
//   v_s
//
// The scores need whole rows before the first output, so a token's S rows (129 KB for 9 of 7168) are held on
// chip and read once. A CTA stays on its multiprocessor and walks over tokens. One warp keeps bulk copies of
// the next token's rows coming, one slot of shared memory a source; the others move a slot to registers, hand
// it back, and work while it is filled again. All sums of a token cross the CTA in one exchange.
#include <algorithm>

#include "godwit/kernels/cuda/sm90/kda_chunk.cuh"
#include "godwit/kernels/cuda/sm90/rows.cuh"

namespace godwit::kernels::cuda {
namespace {

using namespace sm90;

constexpr int kMaxWorkers = kMixMaxWidth / (2 * kVector);  // threads with two vectors of each row
constexpr int kMaxWarps = kMaxWorkers / 32;
constexpr int kMaxThreads = kMaxWorkers + 32;
constexpr int kSlots = kMixMaxSources + 1;  // d_out takes the first in the backward

int worker_count(int width) {
  return (width / kVector + 63) / 64 * 32;
}

// Dynamic shared memory: this, then key [D], then (backward) d_key [D], then the slots [..][D] bf16.
struct MixShared {
  alignas(16) float part[2][kMaxWarps][32];  // sums of the warps, of even and odd tokens
  alignas(8) uint64_t full[kSlots], empty[kSlots];
};

template <bool kBackward>
size_t shared_bytes(int sources, int width) {
  return sizeof(MixShared) + size_t(width) * 4 * (kBackward ? 2 : 1) +
         size_t(sources + kBackward) * width * 2;
}

// One warp's work: sends for rows as their slots become free.
template <bool kBackward>
__device__ __forceinline__ void produce(const MixParams& p, MixShared& shared, uint8_t* slots) {
  const uint32_t bytes = uint32_t(p.width) * 2;
  uint32_t round = 0;
  for (int64_t token = blockIdx.x; token < p.tokens; token += gridDim.x, ++round)
    for (int slot = 0; slot < p.sources + kBackward; ++slot) {
      const void* rows = kBackward ? (slot == 0 ? p.d_out : p.v[slot - 1]) : p.v[slot];
      if (round > 0) mbarrier_wait(&shared.empty[slot], (round - 1) & 1);
      mbarrier_arrive_expect(&shared.full[slot], bytes);
      bulk_load(slots + slot * bytes, static_cast<const uint8_t*>(rows) + token * bytes, bytes,
                &shared.full[slot]);
    }
}

// What the lanes know of a token's sources, source s in lane s: r, score, a; and d in the backward.
struct Scores {
  float r, score, a, d;
};

template <int kMax, bool kBackward>
__device__ __forceinline__ Scores scores_of(const MixParams& p, float sum, int lane) {
  const bool mine = lane < p.sources;
  const float square = sum, dot = __shfl_sync(kAllLanes, sum, (kMax + lane) & 31);
  Scores s{};
  if (mine) s.r = rsqrtf(square / float(p.width) + p.eps), s.score = s.r * dot;
  float top = mine ? s.score : -INFINITY;
#pragma unroll
  for (int m = 16; m > 0; m /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, m));
  const float e = mine ? expf(s.score - top) : 0.f;
  s.a = e / lane_sum(e);
  if constexpr (kBackward) {
    const float along = __shfl_sync(kAllLanes, sum, (2 * kMax + lane) & 31);
    const float mean = lane_sum(mine ? s.a * along : 0.f);
    s.d = mine ? s.a * (along - mean) : 0.f;
  }
  return s;
}

// Moves the vectors of a slot to registers and hands the slot back.
__device__ __forceinline__ void take(uint4 (&x)[2], MixShared& shared, const uint8_t* slots, int slot,
                                     const MixParams& p, uint32_t parity, int thread, int workers) {
  mbarrier_wait(&shared.full[slot], parity);
  const uint4* row = reinterpret_cast<const uint4*>(slots + slot * (p.width * 2));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int unit = thread + i * workers;
    x[i] = unit < p.width / kVector ? row[unit] : make_uint4(0, 0, 0, 0);
  }
  __syncwarp();
  if ((thread & 31) == 0) mbarrier_arrive(&shared.empty[slot]);
}

__device__ __forceinline__ void load_key(float (&key)[kVector], const float* keys, int unit) {
  const float4 a = reinterpret_cast<const float4*>(keys)[2 * unit],
               b = reinterpret_cast<const float4*>(keys)[2 * unit + 1];
  key[0] = a.x, key[1] = a.y, key[2] = a.z, key[3] = a.w;
  key[4] = b.x, key[5] = b.y, key[6] = b.z, key[7] = b.w;
}

// The worker's share of sum v^2, key . v and (backward) d_out . v of every source, as value s, kMax + s,
// 2 kMax + s.
template <int kMax, bool kBackward>
__device__ __forceinline__ void partial_sums(float (&sums)[32], const uint4 (&v)[kMax][2],
                                             const uint4 (&d)[2], const float* keys, int units, int thread,
                                             int workers) {
#pragma unroll
  for (int i = 0; i < 32; ++i) sums[i] = 0.f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int unit = thread + i * workers;
    if (unit >= units) continue;
    float key[kVector];
    load_key(key, keys, unit);
    const Eight out = unpack(d[i]);
#pragma unroll
    for (int s = 0; s < kMax; ++s) {
      const Eight x = unpack(v[s][i]);
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        sums[s] = fmaf(x.x[c], x.x[c], sums[s]);
        sums[kMax + s] = fmaf(key[c], x.x[c], sums[kMax + s]);
        if constexpr (kBackward) sums[2 * kMax + s] = fmaf(out.x[c], x.x[c], sums[2 * kMax + s]);
      }
    }
  }
}

// Sums over the CTA; lane l of every warp gets value l.
__device__ __forceinline__ float sum_workers(float (&sums)[32], MixShared& shared, uint32_t parity, int warp,
                                             int warps, int lane) {
  shared.part[parity][warp][lane] = transpose_sum(sums, lane);
  asm volatile("bar.sync 1, %0;" ::"r"(warps * 32) : "memory");
  float total = 0.f;
  for (int w = 0; w < warps; ++w) total += shared.part[parity][w][lane];
  return total;
}

template <int kMax>
__device__ __forceinline__ void write_mix(const MixParams& p, const uint4 (&v)[kMax][2], const Scores& mine,
                                          int64_t token, int thread, int workers) {
  Eight out[2] = {};
#pragma unroll
  for (int s = 0; s < kMax; ++s) {
    const float a = __shfl_sync(kAllLanes, mine.a, s);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Eight x = unpack(v[s][i]);
#pragma unroll
      for (int c = 0; c < kVector; ++c) out[i].x[c] = fmaf(a, x.x[c], out[i].x[c]);
    }
  }
  const int units = p.width / kVector;
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (thread + i * workers < units) store_unit(p.out, token * units + thread + i * workers, out[i]);
}

template <int kMax>
__device__ __forceinline__ void write_gradients(const MixParams& p, const uint4 (&v)[kMax][2],
                                                const uint4 (&d)[2], const Scores& mine, const float* keys,
                                                float* d_keys, int64_t token, int thread, int workers) {
  const int units = p.width / kVector;
  const float along_key = mine.d * mine.r, along_v = -along_key * mine.r * mine.score / float(p.width);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int unit = thread + i * workers;
    const bool there = unit < units;
    const Eight out = unpack(d[i]);
    float key[kVector], d_key[kVector];
    load_key(key, keys, there ? unit : 0), load_key(d_key, there ? d_keys : keys, there ? unit : 0);
#pragma unroll
    for (int s = 0; s < kMax; ++s) {
      const float a = __shfl_sync(kAllLanes, mine.a, s), b = __shfl_sync(kAllLanes, along_key, s),
                  c = __shfl_sync(kAllLanes, along_v, s);
      const Eight x = unpack(v[s][i]);
      Eight g;
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        g.x[e] = fmaf(a, out.x[e], fmaf(b, key[e], c * x.x[e]));
        d_key[e] = fmaf(b, x.x[e], d_key[e]);
      }
      if (there && s < p.sources) store_unit(p.d_v[s], token * units + unit, g);
    }
    if (!there) continue;
    reinterpret_cast<float4*>(d_keys)[2 * unit] = make_float4(d_key[0], d_key[1], d_key[2], d_key[3]);
    reinterpret_cast<float4*>(d_keys)[2 * unit + 1] = make_float4(d_key[4], d_key[5], d_key[6], d_key[7]);
  }
}

template <int kMax, bool kBackward>
__global__ void __launch_bounds__(kMaxThreads, 1) mix_kernel(const __grid_constant__ MixParams p) {
  extern __shared__ __align__(128) uint8_t dynamic[];
  MixShared& shared = *reinterpret_cast<MixShared*>(dynamic);
  float* const keys = reinterpret_cast<float*>(dynamic + sizeof(MixShared));
  float* const d_keys = keys + p.width;
  uint8_t* const slots = reinterpret_cast<uint8_t*>(kBackward ? d_keys + p.width : d_keys);
  const int workers = blockDim.x - 32, warps = workers / 32, thread = threadIdx.x,
            warp = uniform(thread >> 5), lane = thread & 31;
  for (int c = thread; c < p.width; c += blockDim.x) {
    keys[c] = weight_at(p.norm_weight, c) * weight_at(p.query, c);
    if constexpr (kBackward) d_keys[c] = 0.f;
  }
  if (thread == 0) {
    for (int s = 0; s < kSlots; ++s)
      mbarrier_init(&shared.full[s], 1), mbarrier_init(&shared.empty[s], warps);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (warp == warps) {
    if (lane == 0) produce<kBackward>(p, shared, slots);
    return;
  }
  uint32_t round = 0;
  for (int64_t token = blockIdx.x; token < p.tokens; token += gridDim.x, ++round) {
    uint4 v[kMax][2] = {}, d[2] = {};
    if constexpr (kBackward) take(d, shared, slots, 0, p, round & 1, thread, workers);
#pragma unroll
    for (int s = 0; s < kMax; ++s)
      if (s < p.sources) take(v[s], shared, slots, s + kBackward, p, round & 1, thread, workers);
    float sums[32];
    partial_sums<kMax, kBackward>(sums, v, d, keys, p.width / kVector, thread, workers);
    const float total = sum_workers(sums, shared, round & 1, warp, warps, lane);
    const Scores mine = scores_of<kMax, kBackward>(p, total, lane);
    if constexpr (kBackward)
      write_gradients<kMax>(p, v, d, mine, keys, d_keys, token, thread, workers);
    else
      write_mix<kMax>(p, v, mine, token, thread, workers);
  }
  if constexpr (kBackward) {
    // The worker's own channels: nobody else wrote them.
    float* const part = static_cast<float*>(p.workspace) + int64_t(blockIdx.x) * p.width;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int unit = thread + i * workers;
      if (unit >= p.width / kVector) continue;
      for (int c = 0; c < kVector; ++c) part[unit * kVector + c] = d_keys[unit * kVector + c];
    }
  }
}

// d_key from the CTAs' shares, summed in their order.
__global__ void __launch_bounds__(128) key_gradient_kernel(const __grid_constant__ MixParams p, int parts) {
  __shared__ float part[4][32];
  const int lane = threadIdx.x & 31, group = threadIdx.x >> 5, c = blockIdx.x * 32 + lane;
  float sum = 0.f;
  if (c < p.width)
    for (int i = group; i < parts; i += 4)
      sum += static_cast<const float*>(p.workspace)[int64_t(i) * p.width + c];
  part[group][lane] = sum;
  __syncthreads();
  if (group > 0 || c >= p.width) return;
  sum = (part[0][lane] + part[1][lane]) + (part[2][lane] + part[3][lane]);
  write_weight(p.d_norm_weight, c, sum * weight_at(p.query, c));
  write_weight(p.d_query, c, sum * weight_at(p.norm_weight, c));
}

constexpr int kMaxGrid = 2048;  // of the backward: it sizes the workspace

template <int kMax, bool kBackward>
cudaError_t launch(const MixParams& p) {
  const auto kernel = mix_kernel<kMax, kBackward>;
  const int threads = worker_count(p.width) + 32;
  const size_t bytes = shared_bytes<kBackward>(p.sources, p.width);
  int grid = 0;
  cudaError_t e = resident_grid(kernel, threads, bytes, &grid);
  if (e != cudaSuccess) return e;
  grid = int(std::min<int64_t>({p.tokens, grid, kMaxGrid}));
  kernel<<<grid, threads, bytes, p.stream>>>(p);
  e = cudaGetLastError();
  if (!kBackward || e != cudaSuccess) return e;
  key_gradient_kernel<<<(p.width + 31) / 32, 128, 0, p.stream>>>(p, grid);
  return cudaGetLastError();
}

template <bool kBackward>
int launch_by_sources(const MixParams& p) {
  if (p.sources < 1 || p.sources > kMixMaxSources || p.width % kVector != 0 || p.width > kMixMaxWidth ||
      p.width == 0 || p.tokens == 0)
    return cudaErrorInvalidValue;
  if (p.sources <= 3) return launch<3, kBackward>(p);
  if (p.sources <= 6) return launch<6, kBackward>(p);
  return launch<9, kBackward>(p);
}

}  // namespace

int attn_res_mix_fwd(const MixParams& p) {
  return launch_by_sources<false>(p);
}
size_t attn_res_mix_bwd_workspace_bytes(const MixParams& p) {
  return size_t(kMaxGrid) * p.width * sizeof(float);
}
int attn_res_mix_bwd(const MixParams& p) {
  return launch_by_sources<true>(p);
}

}  // namespace godwit::kernels::cuda
