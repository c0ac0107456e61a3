// What the KDA chunk kernels share: the block of operands that one chunk of one head has, and how it is made.
//
// With G_i the cumulative log-decay inside the chunk and q, k normalised (q times 128^-1/2), per chunk of C =
// 16 tokens:
//   Kd = k e^G   Qd = q e^G   Ki = k e^-G   Kr = k e^(G_last - G)
//   L = stril(diag(beta) Kd Ki^T)   M = tril(Qd Ki^T)   R = (I + L)^-1
// and, from the state S that enters:  U = R diag(beta) (V - Kd S),  O = Qd S + M U,  S' = e^(G_last) S + Kr^T
// U (arXiv:2510.26692). Everything is anchored at the first token of the chunk, so a token never changes a
// bit of what came before it.
#pragma once

#include "godwit/kernels/cuda/sm90/ptx.cuh"
#include "godwit/kernels/kda_heuristic.h"
#include "godwit/kernels/kda_params.h"

namespace godwit::kernels::cuda::sm90 {

constexpr int kChunk = kKdaChunk;
constexpr int kWidth = 128;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kQueryScale = 0.08838834764831845f;  // 128^-1/2
constexpr float kNormEps = 1e-6f;
// The most a chunk may decay, in base 2, for e^-G to be formed in bf16: 16 tokens of the bounded gate's e^-5.
constexpr float kMildDecay = 16 * 5 * kLog2e + 0.01f;

// Byte offsets in a block. Kd, Qd, Kr are bf16 [16][128] in two panels of 64 columns, as wgmma wants them; Kd
// and Qd share their panels so that one product serves both. R - I and M are bf16 [16][16]: the
// diagonal of R is one, so that factor of a product with R stays fp32 (the accumulator starts from it), as
// does beta: folded into R it would cost one more rounding. The decay is fp32:
// channels 8 j + 2 t and 8 j + 2 t + 1 stand at t * kDecayRow + 8 j, so that a lane (t = lane % 4) reads its
// 32 channels in 16-byte pieces.
struct Block {
  static constexpr int kKd = 0, kQd = 2048, kKr = 8192, kR = 12288, kM = 12800, kDecay = 13312,
                       kDecayRow = 144, kBeta = kDecay + 4 * kDecayRow, kBytes = kBeta + 4 * kKdaChunk;
  static constexpr int kPairPanel = 4096, kPanel = 2048;  // bytes from panel to panel of Kd and Qd, of Kr
};

// Bank-conflict-free places of the 16-byte unit `unit` of row `row`: in a matrix of 128-byte panels, and in
// one of 32-byte rows.
__device__ __forceinline__ int wide_offset(int row, int unit, int panel) {
  return (unit >> 3) * panel + row * 128 + (((unit ^ row) & 7) << 4);
}
__device__ __forceinline__ int narrow_offset(int row, int unit) {
  return row * 32 + ((unit ^ ((row >> 2) & 1)) << 4);
}

__device__ __forceinline__ int64_t sequence_begin(const KdaInputs& in, int n) {
  return in.cu_seqlens ? in.cu_seqlens[n] : in.T / in.N * n;
}

// The sequence that owns unit number `unit` (kda_first_unit): the last n whose first unit is not beyond it.
__device__ __forceinline__ int find_sequence(const KdaInputs& in, int64_t unit, int unit_tokens) {
  int low = 0, high = in.N - 1;
  while (low < high) {
    const int middle = (low + high + 1) >> 1;
    if (kda_first_unit(sequence_begin(in, middle), middle, unit_tokens) <= unit)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

// A group of 64 threads holds a chunk of one head: thread p has channels 2p and 2p+1 of every token, packed
// as they came.
struct RawChunk {
  uint32_t q[kChunk], k[kChunk], z[kChunk];
};

__device__ __forceinline__ void load_rows(uint32_t (&rows)[kChunk], const void* base, int64_t offset,
                                          int stride, int valid) {
  const uint32_t* p = static_cast<const uint32_t*>(base) + offset;
#pragma unroll
  for (int t = 0; t < kChunk; ++t) rows[t] = t < valid ? __ldg(p + int64_t(t) * stride) : 0u;
}

__device__ __forceinline__ void group_barrier(int id) {
  asm volatile("bar.sync %0, 64;" ::"r"(id) : "memory");
}

// Sums 32 values over the 32 lanes at once; lane l gets the total of value l. 31 shuffles instead of 160.
template <int kHalf = 16>
__device__ __forceinline__ float transpose_sum(float (&v)[32], int lane) {
  const bool upper = lane & kHalf;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float keep = upper ? v[i + kHalf] : v[i];
    const float give = upper ? v[i] : v[i + kHalf];
    v[i] = keep + __shfl_xor_sync(0xffffffffu, give, kHalf);
  }
  if constexpr (kHalf > 1)
    return transpose_sum<kHalf / 2>(v, lane);
  else
    return v[0];
}

// Scratch of a group, in floats: partial sums [2][32], the norm factors [2][32] (a copy per warp: k tokens,
// then q tokens), beta [16].
struct GroupScratch {
  float sum[2][32];
  float factor[2][32];
  float beta[kChunk];
};

// 1/|k| and 128^-1/2 / |q| of every token, into scratch.factor[warp]. One group barrier inside.
__device__ __forceinline__ void norm_factors(const uint32_t (&q)[kChunk], const uint32_t (&k)[kChunk],
                                             GroupScratch& scratch, int thread, int barrier) {
  const int lane = thread & 31, warp = thread >> 5;
  float v[32];
#pragma unroll
  for (int t = 0; t < kChunk; ++t) {
    v[t] = low_bf16(k[t]) * low_bf16(k[t]) + high_bf16(k[t]) * high_bf16(k[t]);
    v[kChunk + t] = low_bf16(q[t]) * low_bf16(q[t]) + high_bf16(q[t]) * high_bf16(q[t]);
  }
  scratch.sum[warp][lane] = transpose_sum(v, lane);
  group_barrier(barrier);
  const float inverse = rsqrtf(scratch.sum[0][lane] + scratch.sum[1][lane] + kNormEps);
  scratch.factor[warp][lane] = lane < kChunk ? inverse : inverse * kQueryScale;
  __syncwarp();
}

// Log-decay of one channel, in base 2. `rate` = e^A.
template <bool kBounded>
__device__ __forceinline__ float gate_log2(float x, float bound, float rate) {
  if constexpr (kBounded) {
    return bound * kLog2e * rcp_approx(1.f + exp2_approx(-x * rate * kLog2e));
  } else {
    // softplus(x) = max(x, 0) + log(1 + e^-|x|): exact at both limits.
    return -rate * kLog2e * (fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))));
  }
}

// Cumulative log2-decay of the thread's two channels. Rows past `valid` do not decay.
template <bool kBounded>
__device__ __forceinline__ void cumulative_gate(float2 (&G)[kChunk], const uint32_t (&z)[kChunk], float2 dt,
                                                float bound, float rate, int valid) {
  float2 sum = make_float2(0.f, 0.f);
#pragma unroll
  for (int t = 0; t < kChunk; ++t) {
    if (t < valid) {
      sum.x += gate_log2<kBounded>(low_bf16(z[t]) + dt.x, bound, rate);
      sum.y += gate_log2<kBounded>(high_bf16(z[t]) + dt.y, bound, rate);
    }
    G[t] = sum;
  }
}

__device__ __forceinline__ float beta_of(const KdaInputs& in, int64_t token, int head) {
  const int64_t at = token * in.H + head;
  const float logit = in.b_fp32 ? static_cast<const float*>(in.b)[at]
                                : __bfloat162float(static_cast<const __nv_bfloat16*>(in.b)[at]);
  return 1.f / (1.f + __expf(-logit));
}

// 16x16 product of two [16][128] operands, one warp: rows of `a` (panel stride a_panel) by rows of `b`
// (panels like Kr).
__device__ __forceinline__ void row_products(float (&c)[2][4], uint32_t a, int a_panel, uint32_t b,
                                             int lane) {
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) c[j][i] = 0.f;
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    uint32_t fa[4], fb[4];
    ldmatrix_x4(fa, a + wide_offset(lane & 15, step * 2 + (lane >> 4), a_panel));
    ldmatrix_x4(
        fb, b + wide_offset((lane & 7) + ((lane >> 4) << 3), step * 2 + ((lane >> 3) & 1), Block::kPanel));
    mma_bf16(c[0], fa, fb[0], fb[1]);
    mma_bf16(c[1], fa, fb[2], fb[3]);
  }
}

// Lanes 0-15: column `lane` of (I + L)^-1 by forward substitution in fp32, L strictly lower [16][20].
__device__ __forceinline__ void invert_column(float (&x)[kChunk], const float* L, int lane) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    float row[kChunk];
#pragma unroll
    for (int m = 0; m < i; m += 4)
      *reinterpret_cast<float4*>(row + m) = *reinterpret_cast<const float4*>(L + i * 20 + m);
    float a = i == lane ? 1.f : 0.f, b = 0.f;
#pragma unroll
    for (int m = 0; m + 1 < i; m += 2) {
      a = fmaf(-row[m], x[m], a);
      b = fmaf(-row[m + 1], x[m + 1], b);
    }
    if (i & 1) a = fmaf(-row[i - 1], x[i - 1], a);
    x[i] = a + b;
  }
}

// Shared memory of a group beside the block.
struct PrepareScratch {
  alignas(16) uint8_t Ki[4096];
  alignas(16) float L[kChunk * 20];
  alignas(16) GroupScratch group;
  int mild[2];  // of the two warps, see mild_rows
};
}  // namespace godwit::kernels::cuda::sm90
