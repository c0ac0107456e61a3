// Small matrix products on register tiles, C [m, n] (+)= A [m, k] B [k, n], for matrices that fit the caches.
//
// B is repacked into panels of kPanel columns (two vectors): panel p is [k][kPanel], contiguous, zero beyond
// n. A is read element by element (broadcast) and stays as it is, row-major or, with kTransposed, as A^T
// row-major.
//
// Order of arithmetic: every element of C is one chain acc = fma(a_k, b_k, acc) over k ascending from its
// start value, whatever the tile it falls in. So a row's result depends neither on the other rows nor on
// their number, and the few-row products of the decode path (see moe_experts.cpp) give the same bits.
#pragma once

#include "godwit/kernels/cpu/gemm_tile.h"

namespace godwit::kernels::GODWIT_ISA {

// Rows of the tallest tile: two accumulators a row, two vectors of B and one broadcast fill the 32 (16)
// registers.
#ifdef __AVX512F__
inline constexpr int kTallTile = 12;
#else
inline constexpr int kTallTile = 6;
#endif

// For results larger than the caches, written once: no line is read before it is written. p is aligned to a
// vector.
static inline void stream(float* p, Vec v) {
#ifdef __AVX512F__
  _mm512_stream_ps(p, reinterpret_cast<__m512>(v));
#else
  _mm256_stream_ps(p, (__m256)v);
#endif
}

// Asks for the lines of [p, p + n) ahead of use.
template <class T>
static inline void prefetch(const T* p, int64_t n) {
  for (int64_t i = 0; i < n; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(p + i);
}

// Elements of weights: fp32, or bf16 as its 16 bits.
static inline float to_float(float x) {
  return x;
}
static inline float to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, sizeof(x));
  return x;
}
static inline Vec load_as_float(const float* p) {
  return load(p);
}
static inline Vec load_as_float(const uint16_t* p) {
  typedef uint16_t Half __attribute__((vector_size(kLanes * sizeof(uint16_t))));
  typedef uint32_t Wide __attribute__((vector_size(kLanes * sizeof(uint32_t))));
  Half half;
  std::memcpy(&half, p, sizeof(half));
  const Wide wide = __builtin_convertvector(half, Wide) << 16;
  Vec v;
  std::memcpy(&v, &wide, sizeof(v));
  return v;
}

// block[j] = column j of the block w[0..rows)[0..cols), rows in the lanes; zero outside. rows, cols <=
// kLanes.
template <class W>
static inline void load_transposed(const W* w, int64_t ldw, int64_t rows, int64_t cols,
                                   Vec (&block)[kLanes]) {
  if (rows >= kLanes && cols >= kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) block[i] = load_as_float(w + i * ldw);
  } else {
    float copy[kLanes][kLanes] = {};
    for (int64_t i = 0; i < rows && i < kLanes; ++i) {
      for (int64_t j = 0; j < cols && j < kLanes; ++j) copy[i][j] = to_float(w[i * ldw + j]);
    }
    for (int i = 0; i < kLanes; ++i) block[i] = load(copy[i]);
  }
  transpose_lanes(block);
}

// Asks for the lines at w of the next kLanes rows, if there are so many.
template <class W>
static inline void prefetch_rows(const W* w, int64_t ldw, int64_t rows) {
  if (rows < kLanes) return;
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) __builtin_prefetch(w + i * ldw);
}

// dst[kk * kPanel + lane] = w[lane][kk]: kLanes columns of a panel from `rows` rows of W [rows, k], zero
// beyond them. `ahead` rows further down are asked for meanwhile, where they exist: 16 short streams are more
// than the hardware prefetches by itself.
template <class W>
static inline void pack_transposed(float* dst, const W* w, int64_t ldw, int64_t rows, int64_t k,
                                   int64_t ahead) {
  for (int64_t k0 = 0; k0 < k; k0 += kLanes) {
    const int64_t cols = k - k0 < kLanes ? k - k0 : kLanes;
    prefetch_rows(w + ahead * ldw + k0, ldw, rows - ahead);
    Vec block[kLanes];
    load_transposed(w + k0, ldw, rows, cols, block);
    for (int64_t j = 0; j < cols; ++j) store(dst + (k0 + j) * kPanel, block[j]);
  }
}

// Row `kk` of B [k, n] into the panels of a matrix with `k` rows: panel p at dst + p * k * kPanel.
template <class W>
static inline void pack_row(float* dst, int64_t k, int64_t kk, const W* row, int64_t n) {
  int64_t p = 0;
  float* at = dst + kk * kPanel;
  for (; (p + 1) * kPanel <= n; ++p, at += k * kPanel) {
    store(at, load_as_float(row + p * kPanel));
    store(at + kLanes, load_as_float(row + p * kPanel + kLanes));
  }
  if (p * kPanel < n) {
    for (int64_t j = 0; j < kPanel; ++j) at[j] = p * kPanel + j < n ? to_float(row[p * kPanel + j]) : 0.0f;
  }
}

// One tile: init(r, c0, c1) gives the start values of row r, store(r, c0, c1) takes the result.
template <int kRows, bool kTransposed, class Init, class Store>
static inline void tile(int64_t k, const float* a, int64_t lda, const float* panel, const Init& init,
                        const Store& done) {
  Vec c0[kRows], c1[kRows];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) init(r, c0[r], c1[r]);
  for (int64_t kk = 0; kk < k; ++kk) {
    const Vec b0 = load(panel + kk * kPanel);
    const Vec b1 = load(panel + kk * kPanel + kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const Vec ar = splat(kTransposed ? a[kk * lda + r] : a[r * lda + kk]);
      c0[r] = fma(ar, b0, c0[r]);
      c1[r] = fma(ar, b1, c1[r]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) done(r, c0[r], c1[r]);
}

struct ZeroInit {
  void operator()(int64_t, Vec& c0, Vec& c1) const { c0 = c1 = Vec{}; }
};

// All m rows against one panel, in tiles of nearly equal height. Rows are numbered from 0 in init and store.
template <bool kTransposed, class Init, class Store>
static inline void gemm_panel(int64_t m, int64_t k, const float* a, int64_t lda, const float* panel,
                              const Init& init, const Store& done) {
  const int64_t tiles = (m + kTallTile - 1) / kTallTile;
  int64_t row = 0;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t rows = (m - row) / (tiles - i);
    const float* from = kTransposed ? a + row : a + row * lda;
    const auto init_at = [&](int64_t r, Vec& c0, Vec& c1) { init(row + r, c0, c1); };
    const auto done_at = [&](int64_t r, Vec c0, Vec c1) { done(row + r, c0, c1); };
    switch (rows) {
#define GODWIT_TILE(n)                                           \
  case n:                                                        \
    tile<n, kTransposed>(k, from, lda, panel, init_at, done_at); \
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

}  // namespace godwit::kernels::GODWIT_ISA
