// What the forward and backward state passes share: stages of operand blocks, per-warp slices of V or dO, and
// the register forms of a transposed state. A warp holds 16 value columns: s[j][i] is S^T at row g + 8 (i /
// 2), channel 8 j + 2 t + i % 2, with g = lane / 4, t = lane % 4.
#pragma once

#include "godwit/kernels/cuda/sm90/kda_chunk.cuh"

namespace godwit::kernels::cuda::sm90 {

constexpr int kStages = 4;

// The chunks a CTA walks over, forwards (step 1) or backwards (step -1) over tokens [begin, end).
struct Span {
  int64_t begin, end, first_chunk;
  int chunks, step;
  __device__ __forceinline__ int place(int c) const { return step > 0 ? c : chunks - 1 - c; }
  __device__ __forceinline__ int64_t chunk(int c) const { return first_chunk + place(c); }
};

// A lane's place in a [T, H, 128] bf16 tensor, one row a chunk: in units of 16 bytes, which 32 bits hold up
// to T H = 2^28, and how many tokens (from the row's own on) are left in the span. Two registers, and
// registers are what the state passes are short of.
struct RowWalk {
  uint32_t at;
  int left;
  __device__ __forceinline__ RowWalk(int heads, const Span& span, int head, int row, int column)
      : at(uint32_t(((span.begin + span.place(0) * kChunk + row) * heads + head) * (kWidth / 8) +
                    column / 8)),
        left(int(span.end - span.begin) - span.place(0) * kChunk - row) {}
  __device__ __forceinline__ void advance(int heads, int step) {
    at += uint32_t(step * heads * (kChunk * kWidth / 8)), left -= step * kChunk;
  }
};

// kGroups warpgroups of 64 value columns each share the operand blocks.
template <int kGroups, bool kRecord>
struct StateShared {
  static constexpr int kColumns = kGroups * 64, kWarps = kGroups * 4;
  alignas(1024) uint8_t block[kStages][(Block::kBytes + 1023) / 1024 * 1024];
  alignas(128) uint8_t v[kStages][kWarps][512];                // slices [16 tokens][16 V] of the warps
  alignas(128) uint8_t record[kRecord ? kWarps * 4096 : 128];  // S^T of each warp on its way out
  alignas(128) uint8_t out[kWarps][512];  // a [16 V x 16 tokens] result of a warp on its way to rows
  alignas(8) uint64_t full[kStages], empty[kStages];
};

template <class Shared>
__device__ __forceinline__ void init_stages(Shared& shared) {
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s)
      mbarrier_init(&shared.full[s], 1), mbarrier_init(&shared.empty[s], Shared::kWarps);
    mbarrier_init_fence();
  }
  __syncthreads();
}

// Sends for the operand block of the c-th chunk, without Qd and M if they are not wanted. Called by warp 0;
// waits until all warps are done with the stage.
template <bool kQueries, class Shared>
__device__ __forceinline__ void fetch_block(const uint8_t* blocks, int heads, const Span& span,
                                            Shared& shared, int head, uint32_t c, int lane) {
  if (c >= uint32_t(span.chunks)) return;
  const uint32_t s = c % kStages;
  if (c >= kStages) mbarrier_wait(&shared.empty[s], (c / kStages - 1) & 1);
  if (lane != 0) return;
  uint64_t* full = &shared.full[s];
  const uint8_t* from = blocks + (span.chunk(int(c)) * heads + head) * Block::kBytes;
  uint8_t* to = shared.block[s];
  if constexpr (kQueries) {
    mbarrier_arrive_expect(full, Block::kBytes);
    bulk_load(to, from, Block::kBytes, full);
  } else {
    constexpr int kMiddle = Block::kM - Block::kKr,
                  kTail = Block::kBytes - Block::kDecay;  // Kr and R; decay and beta
    mbarrier_arrive_expect(full, 2 * Block::kQd + kMiddle + kTail);
    bulk_load(to, from, Block::kQd, full);
    bulk_load(to + Block::kPairPanel, from + Block::kPairPanel, Block::kQd, full);
    bulk_load(to + Block::kKr, from + Block::kKr, kMiddle, full);
    bulk_load(to + Block::kDecay, from + Block::kDecay, kTail, full);
  }
}

// The warp is done with stage s.
template <class Shared>
__device__ __forceinline__ void release_block(Shared& shared, uint32_t s, int lane) {
  __syncwarp();
  if (lane == 0) mbarrier_arrive(&shared.empty[s]);
}

// Sends for the warp's slice (16 columns) of the chunk `ahead` steps further than the walk, one 16-byte piece
// a lane (row lane / 2). Rows past the end become zeros, so that stale bits (NaN) never enter a product; so
// does everything if `values` is false (the columns of A).
__device__ __forceinline__ void send_slice(const void* rows, int heads, RowWalk walk, int step, int ahead,
                                           bool any, bool values, uint32_t slice) {
  if (!any) return;
  walk.advance(heads, step * ahead);
  const bool there = values && walk.left > 0;
  cp_async_16(slice, static_cast<const uint4*>(rows) + (there ? walk.at : 0), there ? 16 : 0);
}
// The same, and ends the group of copies that wait_slice counts.
__device__ __forceinline__ void fetch_slice(const void* rows, int heads, const RowWalk& walk, int step,
                                            int ahead, bool any, bool values, uint32_t slice) {
  send_slice(rows, heads, walk, step, ahead, any, values, slice);
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// The oldest group is there.
__device__ __forceinline__ void wait_slice() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
  __syncwarp();
}

// Accumulators S^T of a warp from or to a [K][stride] fp32 matrix whose column 0 is the warp's first value
// column.
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

// Writes a transposed 16 x 16 accumulator (rows V, columns tokens; bf16 fragments) as rows of a [T, H, 128]
// tensor; a lane stores half a row.
__device__ __forceinline__ void write_rows(const uint32_t (&f)[4], uint32_t staging, void* rows,
                                           const RowWalk& walk, int lane) {
  __syncwarp();
  stmatrix_x4_trans(staging + narrow_offset(((lane >> 4) << 3) + (lane & 7), (lane >> 3) & 1), f);
  __syncwarp();
  uint32_t x, y, z, w;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
               : "r"(staging + narrow_offset(lane >> 1, lane & 1))
               : "memory");
  if (walk.left > 0) static_cast<uint4*>(rows)[walk.at] = make_uint4(x, y, z, w);
}

// A transposed accumulator [16 V x 16 tokens] as the next product's row-fragment.
__device__ __forceinline__ void pack_rows(uint32_t (&f)[4], const float (&x0)[4], const float (&x1)[4]) {
  f[0] = pack_bf16(x0[0], x0[1]);
  f[1] = pack_bf16(x0[2], x0[3]);
  f[2] = pack_bf16(x1[0], x1[1]);
  f[3] = pack_bf16(x1[2], x1[3]);
}

// Place of a 16-byte unit in the recorded states: [V][128 K] bf16, rows of 256 bytes.
__device__ __forceinline__ int record_offset(int row, int unit) {
  return row * 256 + ((unit ^ (row & 7)) << 4);
}

// S^T as bf16 row-fragments of kSteps 16-wide K steps, from step `first` on.
template <int kSteps>
__device__ __forceinline__ void pack_steps(uint32_t (&f)[kSteps][4], const float (&s)[16][4], int first) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* x = s[2 * (first + k) + (i >> 1)] + 2 * (i & 1);
      f[k][i] = pack_bf16(x[0], x[1]);
    }
}

// Writes packed S^T rows of a warp, bf16 [16 V][128 K], to global memory through shared memory; they stand in
// record_offset order. By ordinary stores: a bulk copy would have the chunk wait for its fence and its issue.
__device__ __forceinline__ void record_state(const uint32_t (&f)[8][4], uint8_t* record, uint8_t* to,
                                             int lane) {
  __syncwarp();
#pragma unroll
  for (int k = 0; k < 8; ++k)
    stmatrix_x4(smem_address(record) + record_offset(lane & 15, 2 * k + (lane >> 4)), f[k]);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int at = i * 32 + lane;
    __stcs(reinterpret_cast<uint4*>(to) + at, reinterpret_cast<const uint4*>(record)[at]);
  }
}

// beta of the lane's four tokens: 2 t, 2 t + 1, and these plus 8.
struct LaneBeta {
  float2 low, high;
  __device__ __forceinline__ LaneBeta(const uint8_t* block, int lane) {
    const float2* beta = reinterpret_cast<const float2*>(block + Block::kBeta) + (lane & 3);
    low = beta[0], high = beta[4];
  }
  // Of column i of tile j of an accumulator whose columns are tokens.
  __device__ __forceinline__ float at(int j, int i) const {
    return j == 0 ? (i == 0 ? low.x : low.y) : (i == 0 ? high.x : high.y);
  }
};

// S^T diag(decay); `decay` points at the lane's channels.
__device__ __forceinline__ void scale_state(float (&s)[16][4], const uint8_t* decay) {
#pragma unroll
  for (int j = 0; j < 16; j += 2) {
    const float4 d = *reinterpret_cast<const float4*>(decay + j * 8);
    s[j][0] *= d.x, s[j][1] *= d.y, s[j][2] *= d.x, s[j][3] *= d.y;
    s[j + 1][0] *= d.z, s[j + 1][1] *= d.w, s[j + 1][2] *= d.z, s[j + 1][3] *= d.w;
  }
}

}  // namespace godwit::kernels::cuda::sm90
