// Makes the operand block of one chunk of one head (kda_chunk.cuh) in shared memory, by a group of 64
// threads.
#pragma once

#include "godwit/kernels/cuda/sm90/kda_chunk.cuh"

namespace godwit::kernels::cuda::sm90 {

// Kd, Qd, Kr, Ki and the decay of the thread's two channels. With the unbounded gate Ki may overflow: it is
// used only of rows where it does not.
template <bool kBounded>
__device__ __forceinline__ void write_operands(const RawChunk& raw, const float2 (&G)[kChunk], uint8_t* block,
                                               PrepareScratch& scratch, int thread) {
  const float* factor = scratch.group.factor[thread >> 5];
  const float2 last = G[kChunk - 1];
  const float2 decay = make_float2(exp2_approx(last.x), exp2_approx(last.y));
  *reinterpret_cast<float2*>(block + Block::kDecay + (thread & 3) * Block::kDecayRow + (thread >> 2) * 8) =
      decay;
#pragma unroll
  for (int t = 0; t < kChunk; ++t) {
    const float rk = factor[t], rq = factor[kChunk + t];
    const float2 k = make_float2(low_bf16(raw.k[t]) * rk, high_bf16(raw.k[t]) * rk);
    const float2 q = make_float2(low_bf16(raw.q[t]) * rq, high_bf16(raw.q[t]) * rq);
    const float2 e = make_float2(exp2_approx(G[t].x), exp2_approx(G[t].y));
    const int pair_at = wide_offset(t, thread >> 2, Block::kPairPanel) + (thread & 3) * 4;
    const int at = wide_offset(t, thread >> 2, Block::kPanel) + (thread & 3) * 4;
    *reinterpret_cast<uint32_t*>(block + Block::kKd + pair_at) = pack_bf16(k.x * e.x, k.y * e.y);
    *reinterpret_cast<uint32_t*>(block + Block::kQd + pair_at) = pack_bf16(q.x * e.x, q.y * e.y);
    const float2 i = make_float2(k.x * exp2_approx(-G[t].x), k.y * exp2_approx(-G[t].y));
    *reinterpret_cast<uint32_t*>(scratch.Ki + at) = pack_bf16(i.x, i.y);
    const float2 r =
        kBounded ? make_float2(i.x * decay.x, i.y * decay.y)
                 : make_float2(k.x * exp2_approx(last.x - G[t].x), k.y * exp2_approx(last.y - G[t].y));
    *reinterpret_cast<uint32_t*>(block + Block::kKr + at) = pack_bf16(r.x, r.y);
  }
}

// How many rows, from the first on, have decayed by no more than what the bounded gate may in a chunk, in all
// channels. A row's own and earlier tokens decide, so later ones do not change its bits. One group barrier
// inside.
__device__ __forceinline__ int mild_rows(const float2 (&G)[kChunk], PrepareScratch& scratch, int thread,
                                         int barrier) {
  int mild = 0;
#pragma unroll
  for (int t = 0; t < kChunk; ++t) mild += fminf(G[t].x, G[t].y) >= -kMildDecay;
  mild = __reduce_min_sync(0xffffffffu, mild);
  if ((thread & 31) == 0) scratch.mild[thread >> 5] = mild;
  group_barrier(barrier);
  return min(scratch.mild[0], scratch.mild[1]);
}

// L (fp32, with beta) and M by tensor cores: warp 0 makes L, warp 1 makes M.
__device__ __forceinline__ void score_products(uint8_t* block, PrepareScratch& scratch, int thread) {
  const int lane = thread & 31, g = lane >> 2, t2 = (lane & 3) * 2;
  float c[2][4];
  row_products(c, smem_address(block + (thread < 32 ? Block::kKd : Block::kQd)), Block::kPairPanel,
               smem_address(scratch.Ki), lane);
  if (thread < 32) {
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = g + 8 * r, column = 8 * j + t2;
        const float beta = scratch.group.beta[row];
        scratch.L[row * 20 + column] = column < row ? beta * c[j][2 * r] : 0.f;
        scratch.L[row * 20 + column + 1] = column + 1 < row ? beta * c[j][2 * r + 1] : 0.f;
      }
  } else {
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = g + 8 * r, column = 8 * j + t2;
        const float m0 = column <= row ? c[j][2 * r] : 0.f, m1 = column + 1 <= row ? c[j][2 * r + 1] : 0.f;
        *reinterpret_cast<uint32_t*>(block + Block::kM + narrow_offset(row, j) + t2 * 2) = pack_bf16(m0, m1);
      }
  }
}

// Rows `first` and on of L and M for the unbounded gate, where e^-G may overflow: the exponents are
// subtracted pair by pair, each thread sums its two channels, and the lanes sum all pairs of a row at once.
// The space of Ki takes the sums of the two warps. Two group barriers inside.
__device__ __forceinline__ void score_pairs(const RawChunk& raw, const float2 (&G)[kChunk], uint8_t* block,
                                            PrepareScratch& scratch, int first, int thread, int barrier) {
  auto* const part = reinterpret_cast<float(*)[kChunk][32]>(scratch.Ki);  // [warp][row][L, then M]
  group_barrier(barrier);                                                 // Ki has been read
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if (i < first) continue;
    float v[32];
    const float2 ki = make_float2(low_bf16(raw.k[i]), high_bf16(raw.k[i])),
                 qi = make_float2(low_bf16(raw.q[i]), high_bf16(raw.q[i]));
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      v[j] = v[kChunk + j] = 0.f;
      if (j > i) continue;
      const float2 kj = make_float2(low_bf16(raw.k[j]) * exp2_approx(G[i].x - G[j].x),
                                    high_bf16(raw.k[j]) * exp2_approx(G[i].y - G[j].y));
      v[j] = ki.x * kj.x + ki.y * kj.y;
      v[kChunk + j] = qi.x * kj.x + qi.y * kj.y;
    }
    part[thread >> 5][i][thread & 31] = transpose_sum(v, thread & 31);
  }
  group_barrier(barrier);
  const float* factor = scratch.group.factor[thread >> 5];
  for (int at = first * 32 + thread; at < kChunk * 32; at += 64) {
    const int i = at >> 5, j = at & 15;
    const float sum = (part[0][i][at & 31] + part[1][i][at & 31]) * factor[j];
    if ((at & 16) == 0)
      scratch.L[i * 20 + j] = j < i ? scratch.group.beta[i] * factor[i] * sum : 0.f;
    else
      *reinterpret_cast<__nv_bfloat16*>(block + Block::kM + narrow_offset(i, j >> 3) + (j & 7) * 2) =
          __float2bfloat16(j <= i ? factor[kChunk + i] * sum : 0.f);
  }
}

// R - I, R = (I + L)^-1, and beta, warp 0.
__device__ __forceinline__ void write_inverse(uint8_t* block, const PrepareScratch& scratch, int lane) {
  if (lane >= kChunk) return;
  float x[kChunk];
  invert_column(x, scratch.L, lane);
#pragma unroll
  for (int i = 0; i < kChunk; ++i)
    *reinterpret_cast<__nv_bfloat16*>(block + Block::kR + narrow_offset(i, lane >> 3) + (lane & 7) * 2) =
        __float2bfloat16(i == lane ? 0.f : x[i]);
  reinterpret_cast<float*>(block + Block::kBeta)[lane] = scratch.group.beta[lane];
}

// The whole block. After it a barrier of the group is due before anyone reads.
template <bool kBounded>
__device__ __forceinline__ void prepare_chunk(const KdaInputs& in, int64_t token, int valid, int head,
                                              uint8_t* block, PrepareScratch& scratch, int thread,
                                              int barrier) {
  RawChunk raw;
  const int stride = in.H * (kWidth / 2);
  const int64_t offset = (token * in.H + head) * (kWidth / 2) + thread;
  load_rows(raw.k, in.k, offset, stride, valid);
  load_rows(raw.q, in.q, offset, stride, valid);
  load_rows(raw.z, in.z, offset, stride, valid);
  const float2 dt = *reinterpret_cast<const float2*>(in.dt_bias + head * kWidth + 2 * thread);
  const float rate = expf(in.A_log[head]);
  if (thread < kChunk) scratch.group.beta[thread] = thread < valid ? beta_of(in, token + thread, head) : 0.f;
  norm_factors(raw.q, raw.k, scratch.group, thread, barrier);
  float2 G[kChunk];
  cumulative_gate<kBounded>(G, raw.z, dt, in.gate_bound, rate, valid);
  write_operands<kBounded>(raw, G, block, scratch, thread);
  if constexpr (kBounded) {
    group_barrier(barrier);
    score_products(block, scratch, thread);
    if (thread < 32) __syncwarp();
  } else {
    const int mild = mild_rows(G, scratch, thread, barrier);
    score_products(block, scratch, thread);
    if (mild < kChunk) {
      score_pairs(raw, G, block, scratch, mild, thread, barrier);
      group_barrier(barrier);
    } else if (thread < 32) {
      __syncwarp();
    }
  }
  if (thread < 32) write_inverse(block, scratch, thread);
}

}  // namespace godwit::kernels::cuda::sm90
