// Which keys a query sees inside a block, and products on register tiles that touch nothing else. Positions
// are counted from a sequence's first key.
#pragma once

#include <algorithm>
#include <limits>

#include "godwit/kernels/cpu/attention_isa.h"
#include "godwit/kernels/cpu/lanes.h"
#include "godwit/kernels/cpu/tile.h"

namespace godwit::kernels::GODWIT_ISA {

static inline float reduce_max(Vec v) {
#ifdef __AVX512F__
  typedef float Half __attribute__((vector_size(32)));
  const Half low = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7);
  const Half high = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m256 y = _mm256_max_ps((__m256)low, (__m256)high);
#else
  const __m256 y = (__m256)v;
#endif
  const __m128 half = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  const __m128 quarter = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_shuffle_ps(quarter, quarter, 1)));
}

// Entries [first(r), last(r)] of the depth that belong to row r: r + first_offset and r + last_offset, cut to
// [0, depth). Both grow with r: for queries over keys, and the other way round.
struct Band {
  int64_t first_offset = 0, last_offset = 0;
  int64_t depth = 0;
  [[nodiscard]] int64_t first(int64_t r) const { return std::max<int64_t>(0, r + first_offset); }
  [[nodiscard]] int64_t last(int64_t r) const { return std::min(depth - 1, r + last_offset); }
  // Rows [begin, end) of `rows` that have an entry among [from, to].
  [[nodiscard]] int64_t begin(int64_t rows, int64_t from) const {
    return std::clamp<int64_t>(from - last_offset, 0, rows);
  }
  [[nodiscard]] int64_t end(int64_t rows, int64_t to) const {
    return std::clamp<int64_t>(to - first_offset + 1, 0, rows);
  }
};

inline constexpr int64_t kFar = int64_t{1} << 40;

// Queries at positions position .. over keys key .. key + depth - 1.
static inline Band keys_of_queries(int64_t position, int64_t key, int64_t depth, int64_t window) {
  return {.first_offset = position - key - (window > 0 ? window - 1 : kFar),
          .last_offset = position - key,
          .depth = depth};
}
// Keys key .. over `depth` queries at positions position ..
static inline Band queries_of_keys(int64_t position, int64_t key, int64_t depth, int64_t window) {
  return {.first_offset = key - position,
          .last_offset = key - position + (window > 0 ? window - 1 : kFar),
          .depth = depth};
}

// C rows [row, row + kRows) over their bands: chains of fused multiply-adds in ascending order, like tile()
// in tile.h. Entries in no row's band are skipped, those in some rows' are added to these alone.
template <int kRows, bool kTransposed, class Init, class Store>
static inline void band_tile(int64_t row, const Band& band, const float* a, int64_t lda, const float* panel,
                             const Init& init, const Store& done) {
  Vec c0[kRows], c1[kRows];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) init(row + r, c0[r], c1[r]);
  const int64_t begin = band.first(row), end = band.last(row + kRows - 1) + 1;
  const int64_t all_begin = std::min(end, band.first(row + kRows - 1)),
                all_end = std::max(all_begin, band.last(row) + 1);
  const auto left = [&](int r, int64_t kk) {
    return splat(kTransposed ? a[kk * lda + row + r] : a[(row + r) * lda + kk]);
  };
  const auto some = [&](int64_t from, int64_t to) {
    for (int64_t kk = from; kk < to; ++kk) {
      const Vec b0 = load(panel + kk * kPanel), b1 = load(panel + kk * kPanel + kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        if (kk < row + r + band.first_offset || kk > row + r + band.last_offset) continue;
        c0[r] = fma(left(r, kk), b0, c0[r]);
        c1[r] = fma(left(r, kk), b1, c1[r]);
      }
    }
  };
  some(begin, all_begin);
  for (int64_t kk = all_begin; kk < all_end; ++kk) {
    const Vec b0 = load(panel + kk * kPanel), b1 = load(panel + kk * kPanel + kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const Vec ar = left(r, kk);
      c0[r] = fma(ar, b0, c0[r]);
      c1[r] = fma(ar, b1, c1[r]);
    }
  }
  some(all_end, end);
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) done(row + r, c0[r], c1[r]);
}

// Rows [begin, end) against one panel; rows without a band only pass through init and done.
template <bool kTransposed, class Init, class Store>
static inline void band_panel(int64_t begin, int64_t end, const Band& band, const float* a, int64_t lda,
                              const float* panel, const Init& init, const Store& done) {
  const int64_t tiles = (end - begin + kTallTile - 1) / kTallTile;
  int64_t row = begin;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t rows = (end - row) / (tiles - i);
    switch (rows) {
#define GODWIT_TILE(n)                                               \
  case n:                                                            \
    band_tile<n, kTransposed>(row, band, a, lda, panel, init, done); \
    break;
      GODWIT_TILE(1)
      GODWIT_TILE(2)
      GODWIT_TILE(3)
      GODWIT_TILE(4)
      GODWIT_TILE(5)
      GODWIT_TILE(6)
#ifdef __AVX512F__
      GODWIT_TILE(7)
      GODWIT_TILE(8)
      GODWIT_TILE(9)
      GODWIT_TILE(10)
      GODWIT_TILE(11)
      GODWIT_TILE(12)
#endif
#undef GODWIT_TILE
      default:
        __builtin_unreachable();
    }
    row += rows;
  }
}

// Panels of B = X^T, X = `rows` rows of `width` floats: panel p holds rows p * kPanel .. as columns,
// [width][kPanel].
static inline void pack_columns(float* panels, const float* x, int64_t stride, int64_t rows, int64_t width) {
  for (int64_t first = 0; first < rows; first += kLanes) {
    pack_transposed(panels + first / kPanel * width * kPanel + first % kPanel, x + first * stride, stride,
                    rows - first, width, kLanes);
  }
  if ((rows + kLanes - 1) / kLanes % 2 == 0) return;
  float* half = panels + rows / kPanel * width * kPanel + kLanes;  // of the last panel, without columns
  for (int64_t d = 0; d < width; ++d) store(half + d * kPanel, Vec{});
}

// Panels of B = X: panel p holds columns p * kPanel .., [depth][kPanel].
static inline void pack_rows(float* panels, int64_t depth, const float* x, int64_t stride, int64_t rows,
                             int64_t width) {
  for (int64_t r = 0; r < rows; ++r) pack_row(panels, depth, r, x + r * stride, width);
}

}  // namespace godwit::kernels::GODWIT_ISA
