// What the forward and backward state passes share: stages of operand blocks, per-warp slices of V or dO, and the register forms of a transposed
// state. A warp holds 16 value columns: s[j][i] is S^T at row g + 8 (i / 2), channel 8 j + 2 t + i % 2, with g = lane / 4, t = lane % 4.
#pragma once

#include "godwit/kernels/cuda/sm90/kda_chunk.cuh"

namespace godwit::kernels::sm90 {

constexpr int kStages = 4;

// The chunks a CTA walks over, forwards (step 1) or backwards (step -1) over tokens [begin, end).
struct Span {
  int64_t begin, end, first_chunk;
  int chunks, step;
  __device__ __forceinline__ int place(int c) const { return step > 0 ? c : chunks - 1 - c; }
  __device__ __forceinline__ int64_t chunk(int c) const { return first_chunk + place(c); }
  __device__ __forceinline__ int64_t token(int c) const { return begin + int64_t(place(c)) * kChunk; }
};

template <int kGroups, bool kRecord>
struct StateShared {
  static constexpr int kColumns = kGroups * 64, kWarps = kGroups * 4;
  alignas(1024) uint8_t block[kStages][Block::kBytes + 512];
  alignas(128) uint8_t v[kStages][kWarps][512];           // slices [16 tokens][16 V] of the warps
  alignas(128) uint8_t record[kRecord ? kWarps * 4096 : 128];  // S^T of each warp on its way out
  alignas(128) uint8_t out[kWarps][512];                  // a [16 V x 16 tokens] result of a warp on its way to rows
  alignas(8) uint64_t full[kStages], empty[kStages];
};

template <class Shared>
__device__ __forceinline__ void init_stages(Shared& shared) {
  for (int s = 0; s < kStages; ++s) mbarrier_init(&shared.full[s], 1), mbarrier_init(&shared.empty[s], Shared::kWarps);
  mbarrier_init_fence();
}

// Sends for the operand block of the c-th chunk. Called by warp 0; waits until all warps are done with the stage.
template <class Shared>
__device__ __forceinline__ void fetch_block(const uint8_t* blocks, int heads, const Span& span, Shared& shared, int head, int c, int lane) {
  if (c >= span.chunks) return;
  const int s = c % kStages;
  if (c >= kStages) mbarrier_wait(&shared.empty[s], (c / kStages - 1) & 1);
  if (lane == 0) {
    mbarrier_arrive_expect(&shared.full[s], Block::kBytes);
    bulk_load(shared.block[s], blocks + (span.chunk(c) * heads + head) * Block::kBytes, Block::kBytes, &shared.full[s]);
  }
}

// Sends for the warp's slice (16 columns from `column`) of the c-th chunk of a [T, H, 128] tensor, one 16-byte piece a lane. Rows past the end
// become zeros, so that stale bits (NaN) never enter a product; so does everything for columns of 128 and more.
__device__ __forceinline__ void fetch_slice(const void* rows, int heads, const Span& span, uint8_t* slice, int head, int column, int c, int lane) {
  const int row = lane >> 1, half = lane & 1;
  if (c < span.chunks) {
    const int64_t token = span.token(c) + row;
    const bool there = column < kWidth && token < span.end;
    const __nv_bfloat16* from = static_cast<const __nv_bfloat16*>(rows) + (there ? (token * heads + head) * kWidth + column + half * 8 : 0);
    cp_async_16(smem_address(slice + narrow_offset(row, half)), from, there ? 16 : 0);
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// The oldest slice is there.
__device__ __forceinline__ void wait_slice() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
  __syncwarp();
}

// Accumulators S^T of a warp from or to a [K][stride] fp32 matrix whose column 0 is the warp's first value column.
__device__ __forceinline__ void load_state(float (&s)[16][4], const float* p, int stride, int lane) {
  const int g = lane >> 2, t2 = (lane & 3) * 2;
#pragma unroll
  for (int j = 0; j < 16; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[j][i] = p[(8 * j + t2 + (i & 1)) * stride + g + 8 * (i >> 1)];
}
__device__ __forceinline__ void store_state(const float (&s)[16][4], float* p, int stride, int lane) {
  const int g = lane >> 2, t2 = (lane & 3) * 2;
#pragma unroll
  for (int j = 0; j < 16; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) p[(8 * j + t2 + (i & 1)) * stride + g + 8 * (i >> 1)] = s[j][i];
}

// Writes a transposed 16 x 16 accumulator (rows V, columns tokens; bf16 fragments) as rows of a [T, H, 128] tensor.
__device__ __forceinline__ void write_rows(const uint32_t (&f)[4], uint8_t* staging, __nv_bfloat16* out, int stride, int valid, int lane) {
  const int matrix = lane >> 3;
  __syncwarp();
  stmatrix_x4_trans(smem_address(staging) + narrow_offset((matrix >> 1) * 8 + (lane & 7), matrix & 1), f);
  __syncwarp();
  const int token = lane >> 1, half = lane & 1;
  const uint4 row = *reinterpret_cast<const uint4*>(staging + narrow_offset(token, half));
  if (token < valid) *reinterpret_cast<uint4*>(out + int64_t(token) * stride + half * 8) = row;
}

// A transposed accumulator [16 V x 16 tokens] as the next product's row-fragment.
__device__ __forceinline__ void pack_rows(uint32_t (&f)[4], const float (&x0)[4], const float (&x1)[4]) {
  f[0] = pack_bf16(x0[0], x0[1]);
  f[1] = pack_bf16(x0[2], x0[3]);
  f[2] = pack_bf16(x1[0], x1[1]);
  f[3] = pack_bf16(x1[2], x1[3]);
}

// Place of a 16-byte unit in the recorded states: [V][128 K] bf16, rows of 256 bytes.
__device__ __forceinline__ int record_offset(int row, int unit) { return row * 256 + ((unit ^ (row & 7)) << 4); }

// S^T as bf16 row-fragments of the eight 16-wide K steps.
__device__ __forceinline__ void pack_state(uint32_t (&f)[8][4], const float (&s)[16][4]) {
#pragma unroll
  for (int k = 0; k < 8; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) f[k][i] = pack_bf16(s[2 * k + (i >> 1)][2 * (i & 1)], s[2 * k + (i >> 1)][2 * (i & 1) + 1]);
}

// Writes packed S^T rows of a warp, bf16 [16 V][128 K], to global memory through shared memory; they stand in record_offset order.
__device__ __forceinline__ void record_state(const uint32_t (&f)[8][4], uint8_t* record, uint8_t* to, int lane) {
  if (lane == 0) bulk_wait_read<0>();
  __syncwarp();
#pragma unroll
  for (int k = 0; k < 8; ++k) stmatrix_x4(smem_address(record) + record_offset(lane & 15, 2 * k + (lane >> 4)), f[k]);
  fence_async_shared();
  __syncwarp();
  if (lane == 0) {
    bulk_store(to, record, 4096);
    bulk_commit();
  }
}

// S^T diag(decay); `decay` points at the lane's first channel.
__device__ __forceinline__ void scale_state(float (&s)[16][4], const uint8_t* decay) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const float2 d = *reinterpret_cast<const float2*>(decay + j * 32);
    s[j][0] *= d.x, s[j][1] *= d.y, s[j][2] *= d.x, s[j][3] *= d.y;
  }
}

}  // namespace godwit::kernels::sm90
