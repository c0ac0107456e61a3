// What the kernels of mla_decode share: arguments, parts of sequences, and the small steps of a
// consumer warpgroup. A thread's columns (heads) of scores and of values are 8 j + 2 (lane % 4) and the next,
// j = 0 .. N / 8 - 1; its rows lane / 4 and that plus 8 of its warp's 16.
#pragma once

#include <cuda_bf16.h>

#include "godwit/kernels/cuda/sm90/tma.cuh"
#include "godwit/kernels/cuda/sm90/wgmma.cuh"
#include "godwit/kernels/mla_decode_cuda.h"

namespace godwit::kernels::cuda::sm90 {

constexpr int kMlaPanel = 64 * 128;  // bytes: 64 rows by 64 columns
constexpr int kSharedLimit = 232448;
constexpr int kGroupHeads = 48;  // the most that a block takes

struct DecodeArgs {
  CUtensorMap q;  // boxes of 64 columns by 16 heads
  CUtensorMap x;  // boxes of 64 columns by 64 rows
  const int32_t* table = nullptr;
  const int64_t* lengths = nullptr;
  int table_stride = 0;
  int sequences = 0, heads = 0, groups = 0, rank = 0;
  MlaCut cut;
  int64_t window = 0;
  float scale = 0;         // with log2 e
  float* o = nullptr;      // [parts][N][H][rank]; parts without pages leave nothing
  float2* sums = nullptr;  // [parts][N][H]: m and the sum of P; -inf, 0 of parts without pages
  __host__ __device__ int items() const { return sequences * cut.parts * groups; }
};

// A part: pages [begin, end) of a sequence.
struct Part {
  int sequence, group, part, begin, end;
  int first_row, rows;  // visible rows of the sequence
};
__device__ __forceinline__ Part part_at(const DecodeArgs& a, int item) {
  Part p;
  p.group = item % a.groups, item /= a.groups;
  p.part = item % a.cut.parts, p.sequence = item / a.cut.parts;
  p.rows = int(a.lengths[p.sequence]);
  p.first_row = a.window > 0 ? int(max(int64_t(0), p.rows - a.window)) : 0;
  const int first = p.first_row / 64, pages = (p.rows + 63) / 64 - first;
  const auto border = [&](int part) {
    return a.cut.part_pages > 0 ? min(pages, part * a.cut.part_pages)
                                : int(int64_t(pages) * part / a.cut.parts);
  };
  p.begin = first + border(p.part), p.end = first + border(p.part + 1);
  return p;
}

// The rows of a page outside [low, high) hold anything, NaN too; their values must not meet a zero of P.
__device__ __forceinline__ void clear_rows(uint8_t* panel, int thread, int low, int high) {
  for (int i = thread; i < 64 * 8; i += 128) {
    const int row = i / 8;
    if (row < low || row >= high) reinterpret_cast<uint4*>(panel)[i] = uint4{0, 0, 0, 0};
  }
}

// P [N][64 rows of the page] in bf16, a 128-byte row a head, swizzled, from a warpgroup's registers.
template <int N>
__device__ __forceinline__ void store_p(uint8_t* to, const float (&p)[N / 2], int warp, int lane) {
#pragma unroll
  for (int j = 0; j < N / 8; j += 2) {
    const uint32_t r[4] = {pack_bf16(p[4 * j], p[4 * j + 1]), pack_bf16(p[4 * j + 2], p[4 * j + 3]),
                           pack_bf16(p[4 * j + 4], p[4 * j + 5]), pack_bf16(p[4 * j + 6], p[4 * j + 7])};
    const int row = 8 * j + lane / 16 * 8 + lane % 8, unit = 2 * warp + lane / 8 % 2;
    stmatrix_x4_trans(smem_address(to) + row * 128 + ((unit ^ (row & 7)) << 4), r);
  }
}

// Groups of at most kGroupHeads heads, of rank 256 or 512, pages of bf16 or (launch_decode_fp8) e4m3.
cudaError_t launch_decode_groups(const DecodeArgs& a, int processors, cudaStream_t stream);
cudaError_t launch_decode_fp8(const DecodeArgs& a, int processors, cudaStream_t stream);

}  // namespace godwit::kernels::cuda::sm90
