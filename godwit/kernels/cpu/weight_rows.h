// Rows of a weight matrix as they are stored, read as fp32 in registers: fp32 and bf16, int8 with a scale a
// row, MXFP4 (io/mxfp4.h) with a power of two for 32 values. A weight is value * scale, rounded once to fp32
// (MXFP4 exactly), so a product with packed weights has the bits of the product with the same weights in
// fp32.
#pragma once

#include <algorithm>

#include "godwit/kernels/cpu/tile.h"

namespace godwit::kernels::GODWIT_ISA {

// block[j] = column j of a block, rows in the lanes, zero outside: whole(i) is row i of a whole block,
// value(i, j) one element.
template <class Whole, class Value>
static inline void load_block(int64_t rows, int64_t cols, const Whole& whole, const Value& value,
                              Vec (&block)[kLanes]) {
  if (rows >= kLanes && cols >= kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) block[i] = whole(i);
  } else {
    float copy[kLanes][kLanes] = {};
    for (int64_t i = 0; i < rows && i < kLanes; ++i) {
      for (int64_t j = 0; j < cols && j < kLanes; ++j) copy[i][j] = value(i, j);
    }
    for (int i = 0; i < kLanes; ++i) block[i] = load(copy[i]);
  }
  transpose_lanes(block);
}

// Each kind of rows has: from(r), the rows from r on; load(col, rows, cols, block), columns [col, col + cols)
// of the first `rows` rows, transposed; prefetch(col, rows), which asks for the lines of the first kLanes
// rows there, if there are so many.
template <class W>
struct PlainRows {
  const W* data;
  int64_t stride;

  [[nodiscard]] PlainRows from(int64_t r) const { return {data + r * stride, stride}; }
  void load(int64_t col, int64_t rows, int64_t cols, Vec (&block)[kLanes]) const {
    load_transposed(data + col, stride, rows, cols, block);
  }
  void prefetch(int64_t col, int64_t rows) const { prefetch_rows(data + col, stride, rows); }
};

struct Int8Rows {
  const int8_t* data;
  int64_t stride;
  const float* scale;  // [rows]

  static Vec whole(const int8_t* p) {  // by intrinsics: GCC 12 converts such vectors in many steps
#ifdef __AVX512F__
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return (Vec)_mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, bytes));
#else
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#endif
  }
  [[nodiscard]] Int8Rows from(int64_t r) const {
    return {data + r * stride, stride, scale + r};
  }
  void load(int64_t col, int64_t rows, int64_t cols, Vec (&block)[kLanes]) const {
    const int8_t* at = data + col;
    load_block(
        rows, cols, [&](int64_t i) { return whole(at + i * stride); },
        [&](int64_t i, int64_t j) { return static_cast<float>(at[i * stride + j]); }, block);
    const Vec scales = load_part(scale, rows);
#pragma GCC unroll 16
    for (int j = 0; j < kLanes; ++j) block[j] = block[j] * scales;
  }
  void prefetch(int64_t col, int64_t rows) const {
    prefetch_rows(data + col, stride, rows);
  }
};

// Rows of stride / 2 bytes and stride / 32 scales; columns start at multiples of kLanes.
struct Mxfp4Rows {
  const uint8_t* data;
  int64_t stride;  // values
  const uint8_t* scale;

  static float power(uint8_t byte) {  // 2^(byte - 127); 255 is NaN
    const uint32_t bits = byte == 255 ? 0x7fc00000u : byte == 0 ? 0x00400000u : uint32_t{byte} << 23;
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
  }
  static Vec values(const uint8_t* packed) {  // of kLanes / 2 bytes, the low half of a byte first
    uint64_t bits = 0;
    std::memcpy(&bits, packed, kLanes / 2);
    const __m128i low = _mm_cvtsi64_si128(static_cast<int64_t>(bits & 0x0f0f0f0f0f0f0f0full));
    const __m128i high = _mm_cvtsi64_si128(static_cast<int64_t>(bits >> 4 & 0x0f0f0f0f0f0f0f0full));
    const __m128i codes = _mm_unpacklo_epi8(low, high);
#ifdef __AVX512F__
    const __m512 table =
        _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    return (Vec)_mm512_maskz_permutexvar_ps(0xffff, _mm512_maskz_cvtepu8_epi32(0xffff, codes), table);
#else
    const __m256i code = _mm256_cvtepu8_epi32(codes);
    const __m256 size = _mm256_permutevar8x32_ps(_mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6), code);
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(code, _mm256_set1_epi32(8)), 28);
    return (Vec)_mm256_xor_ps(size, _mm256_castsi256_ps(sign));
#endif
  }

  [[nodiscard]] Mxfp4Rows from(int64_t r) const {
    return {data + r * (stride / 2), stride, scale + r * (stride / 32)};
  }
  void load(int64_t col, int64_t rows, int64_t /*cols: whole*/, Vec (&block)[kLanes]) const {
    const int64_t last = std::min<int64_t>(rows, kLanes) - 1;
    for (int i = 0; i < kLanes; ++i) {
      block[i] = i > last ? Vec{}
                          : values(data + i * (stride / 2) + col / 2) *
                                splat(power(scale[i * (stride / 32) + col / 32]));
    }
    transpose_lanes(block);
  }
  void prefetch(int64_t col, int64_t rows) const {
    prefetch_rows(data + col / 2, stride / 2, rows);
  }
};

// dst[kk * kPanel + lane] = row `lane`, column kk: kLanes columns of a panel, zero beyond the first `rows`
// rows. `ahead` rows further down are asked for meanwhile, where they exist.
template <class Rows>
static inline void pack_weight_rows(float* dst, const Rows& w, int64_t rows, int64_t k, int64_t ahead) {
  for (int64_t k0 = 0; k0 < k; k0 += kLanes) {
    const int64_t cols = k - k0 < kLanes ? k - k0 : kLanes;
    if (rows - ahead >= kLanes) w.from(ahead).prefetch(k0, rows - ahead);
    Vec block[kLanes];
    w.load(k0, rows, cols, block);
    for (int64_t j = 0; j < cols; ++j) store(dst + (k0 + j) * kPanel, block[j]);
  }
}

}  // namespace godwit::kernels::GODWIT_ISA
