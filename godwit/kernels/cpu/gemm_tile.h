// Register tiles for the small products of chunked kernels, fp32, any row-major operands. Included only by
// kernels/cpu/*.cpp (see simd.h). The order of additions into an element depends on the depth only, not on
// the tile an element falls into: results do not change with the number of rows or columns.
#pragma once

#include "godwit/kernels/cpu/simd.h"

namespace godwit::kernels::GODWIT_ISA {

// A panel is a block of columns two vectors wide; a tile is kTileRows rows of it, so that the accumulators,
// two vectors of the right operand and one broadcast fill the registers without spills.
inline constexpr int kPanel = 2 * kLanes;
#ifdef __AVX512F__
inline constexpr int kTileRows = 8;
#else
inline constexpr int kTileRows = 4;
#endif

static inline int64_t round_up(int64_t x, int64_t to) {
  return (x + to - 1) / to * to;
}

// acc[r][n] += sum_{d < depth} a[r * a_row + d * a_depth] * b[d * b_depth + n * kLanes ..]
template <int kRows, int kVectors>
[[gnu::always_inline]] static inline void madd_tile(Vec (&acc)[kRows][kVectors], const float* a,
                                                    int64_t a_row, int64_t a_depth, const float* b,
                                                    int64_t b_depth, int64_t depth) {
  for (int64_t d = 0; d < depth; ++d) {
    Vec right[kVectors];
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) right[n] = load(b + d * b_depth + n * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec left = splat(a[r * a_row + d * a_depth]);
#pragma GCC unroll 4
      for (int n = 0; n < kVectors; ++n) acc[r][n] += left * right[n];
    }
  }
}

}  // namespace godwit::kernels::GODWIT_ISA
