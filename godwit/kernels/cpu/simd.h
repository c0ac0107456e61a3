// A vector of floats of the width the file is compiled for (GODWIT_ISA = avx2: 8 lanes, avx512: 16 lanes), on
// GCC/Clang vector extensions: arithmetic operators work on Vec directly. Included only by kernels/cpu/*.cpp,
// inside their ISA namespace rules: everything here is `static inline`, so that no definition compiled for
// AVX-512 is shared with a file compiled for AVX2.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace godwit::kernels::GODWIT_ISA {

#ifdef __AVX512F__
inline constexpr int kLanes = 16;
#else
inline constexpr int kLanes = 8;
#endif
typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t VecI __attribute__((vector_size(kLanes * sizeof(int32_t))));

static inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
static inline void store(float* p, Vec v) {
  std::memcpy(p, &v, sizeof(v));
}
static inline Vec splat(float x) {
  return x - Vec{};  // x - 0 is x, -0 included: a bare broadcast, where 0 + x needs an addition
}

// Sums of kLanes vectors at once: lane n of the result is the sum over the lanes of a[n]. (Shuffles are
// written with the builtin, since GCC 12 warns inside its own AVX-512 intrinsics.)
static inline Vec reduce_lanes(const Vec* a) {
#ifdef __AVX512F__
  const auto pair = [](Vec x, Vec y) {
    return __builtin_shufflevector(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
           __builtin_shufflevector(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  };
  const auto quad = [](Vec x, Vec y) {
    return __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  };
  const auto fold = [](Vec x, Vec y) {
    return __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  };
  Vec quads[4];
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n) {
    quads[n] = quad(pair(a[4 * n], a[4 * n + 1]), pair(a[4 * n + 2], a[4 * n + 3]));
  }
  return fold(fold(quads[0], quads[1]), fold(quads[2], quads[3]));
#else
  const auto raw = [&](int n) { return reinterpret_cast<__m256>(a[n]); };
  const __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(raw(0), raw(1)), _mm256_hadd_ps(raw(2), raw(3)));
  const __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(raw(4), raw(5)), _mm256_hadd_ps(raw(6), raw(7)));
  return reinterpret_cast<Vec>(
      _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)));
#endif
}

// Lane n of r[m] and lane m of r[n] change places.
static inline void transpose_lanes(Vec (&r)[kLanes]) {
  Vec t[kLanes];
#ifdef __AVX512F__
#pragma GCC unroll 4
  for (int n = 0; n < 16; n += 4) {
    const auto low = [](Vec x, Vec y) {
      return __builtin_shufflevector(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    };
    const auto high = [](Vec x, Vec y) {
      return __builtin_shufflevector(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    };
    const auto even = [](Vec x, Vec y) {
      return __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    };
    const auto odd = [](Vec x, Vec y) {
      return __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    };
    const Vec a = low(r[n], r[n + 1]), b = low(r[n + 2], r[n + 3]);
    const Vec c = high(r[n], r[n + 1]), d = high(r[n + 2], r[n + 3]);
    t[n] = even(a, b), t[n + 1] = odd(a, b), t[n + 2] = even(c, d), t[n + 3] = odd(c, d);
  }
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n) {  // quarter L of t[4m + n] holds rows 4m.. of column 4L + n
    const auto even = [](Vec x, Vec y) {
      return __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    };
    const auto odd = [](Vec x, Vec y) {
      return __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    };
    const Vec a = even(t[n], t[4 + n]), b = even(t[8 + n], t[12 + n]);
    const Vec c = odd(t[n], t[4 + n]), d = odd(t[8 + n], t[12 + n]);
    r[n] = even(a, b), r[8 + n] = odd(a, b), r[4 + n] = even(c, d), r[12 + n] = odd(c, d);
  }
#else
#pragma GCC unroll 2
  for (int n = 0; n < 8; n += 4) {
    const Vec a = __builtin_shufflevector(r[n], r[n + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    const Vec b = __builtin_shufflevector(r[n + 2], r[n + 3], 0, 8, 1, 9, 4, 12, 5, 13);
    const Vec c = __builtin_shufflevector(r[n], r[n + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    const Vec d = __builtin_shufflevector(r[n + 2], r[n + 3], 2, 10, 3, 11, 6, 14, 7, 15);
    t[n] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
    t[n + 1] = __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    t[n + 2] = __builtin_shufflevector(c, d, 0, 1, 8, 9, 4, 5, 12, 13);
    t[n + 3] = __builtin_shufflevector(c, d, 2, 3, 10, 11, 6, 7, 14, 15);
  }
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n) {  // half L of t[4m + n] holds rows 4m.. of column 4L + n
    r[n] = __builtin_shufflevector(t[n], t[4 + n], 0, 1, 2, 3, 8, 9, 10, 11);
    r[4 + n] = __builtin_shufflevector(t[n], t[4 + n], 4, 5, 6, 7, 12, 13, 14, 15);
  }
#endif
}

// a b + c, rounded once.
static inline Vec fma(Vec a, Vec b, Vec c) {
#ifdef __AVX512F__
  return reinterpret_cast<Vec>(
      _mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#else
  return reinterpret_cast<Vec>(
      _mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#endif
}

static inline float reduce_add(Vec v) {
  typedef float Half __attribute__((vector_size(32)));
#ifdef __AVX512F__
  const Half y = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                 __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  const Half y = v;
#endif
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)y), _mm256_extractf128_ps((__m256)y, 1));
  const __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_shuffle_ps(quarter, quarter, 1)));
}

// The first `count` floats of p and zeros behind them; p[count] and later are not touched. Any count.
#ifdef __AVX512F__
static inline __mmask16 lane_mask(int64_t count) {
  return static_cast<__mmask16>(count >= kLanes ? 0xffffu : count > 0 ? (1u << count) - 1u : 0u);
}
static inline Vec load_part(const float* p, int64_t count) {
  return reinterpret_cast<Vec>(_mm512_maskz_loadu_ps(lane_mask(count), p));
}
static inline void store_part(float* p, Vec v, int64_t count) {
  _mm512_mask_storeu_ps(p, lane_mask(count), reinterpret_cast<__m512>(v));
}
#else
static inline __m256i lane_mask(int64_t count) {
  const int32_t n = static_cast<int32_t>(count > kLanes ? kLanes : count);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline Vec load_part(const float* p, int64_t count) {
  return reinterpret_cast<Vec>(_mm256_maskload_ps(p, lane_mask(count)));
}
static inline void store_part(float* p, Vec v, int64_t count) {
  _mm256_maskstore_ps(p, lane_mask(count), reinterpret_cast<__m256>(v));
}
#endif

// Where a lane of one operand is NaN, both return that lane of b. (By intrinsics: GCC turns the comparison
// with a constant into a compare and a blend.)
#ifdef __AVX512F__
static inline Vec vmax(Vec a, Vec b) {
  return (Vec)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
}
static inline Vec vmin(Vec a, Vec b) {
  return (Vec)_mm512_maskz_min_ps(0xffff, (__m512)a, (__m512)b);
}
#else
static inline Vec vmax(Vec a, Vec b) {
  return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
}
static inline Vec vmin(Vec a, Vec b) {
  return (Vec)_mm256_min_ps((__m256)a, (__m256)b);
}
#endif

// exp(x), relative error below 2 ulp on [-87.3, 88.3]; saturates outside (0 below -87.3, about 2.4e38
// above 88.3); NaN stays NaN. Cody-Waite reduction by ln 2 and a degree-6 polynomial (Cephes expf).
static inline Vec vexp(Vec x) {
  const Vec clamped = vmin(splat(88.3763f), vmax(splat(-87.3365f), x));
  const Vec shifted = clamped * splat(1.44269504f) + splat(12582912.0f);  // 1.5 * 2^23: rounds to an integer
  const Vec n = vmin(splat(127.0f), shifted - splat(12582912.0f));
  const Vec r = (clamped - n * splat(0.693359375f)) - n * splat(-2.12194440e-4f);
  Vec p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * (r * r) + (r + splat(1.0f));
#ifdef __AVX512F__
  const Vec y = (Vec)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)n);
#else
  const VecI exponent = (__builtin_convertvector(n, VecI) + 127) << 23;
  Vec scale;
  std::memcpy(&scale, &exponent, sizeof(scale));
  const Vec y = p * scale;
#endif
  return x < splat(-87.3365f) ? splat(0.0f) : y;
}
static inline Vec vsigmoid(Vec x) {
  return splat(1.0f) / (splat(1.0f) + vexp(-x));
}
// log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|)), the second term relative error below 1e-6 by the series of
// 2 atanh(t / (2 + t)), t = exp(-|x|).
static inline Vec vsoftplus(Vec x) {
  const Vec t = vexp(-vmax(x, -x));
  const Vec s = t / (t + splat(2.0f));  // at most 1/3
  const Vec s2 = s * s;
  Vec p = splat(1.0f / 15);
  p = p * s2 + splat(1.0f / 13);
  p = p * s2 + splat(1.0f / 11);
  p = p * s2 + splat(1.0f / 9);
  p = p * s2 + splat(1.0f / 7);
  p = p * s2 + splat(1.0f / 5);
  p = p * s2 + splat(1.0f / 3);
  p = p * s2 + splat(1.0f);
  return vmax(x, splat(0.0f)) + (s + s) * p;
}
// tanh(x) = num / den, relative error below 4e-7 (also near 0, where the exponential form cancels). Odd
// rational function x P(x^2) / Q(x^2), degrees 4 and 4, fitted to relative minimax on [0, 8] (6e-9); beyond 8
// tanh is 1 to 2e-7. den is in [1, 250]. Kept apart so that a caller can join several divisions into one.
struct Ratio {
  Vec num;
  Vec den;
};
static inline Ratio tanh_ratio(Vec x) {
  const Vec c = vmin(splat(8.0f), vmax(splat(-8.0f), x));  // in this order NaN stays NaN
  const Vec s = c * c;
  Vec p = splat(1.523053312e-08f);
  p = fma(p, s, splat(2.189474307e-05f));
  p = fma(p, s, splat(3.571602903e-03f));
  p = fma(p, s, splat(1.344450208e-01f));
  p = fma(p, s, splat(9.999999936e-01f));
  Vec q = splat(8.522493132e-07f);
  q = fma(q, s, splat(3.411300024e-04f));
  q = fma(q, s, splat(2.616446147e-02f));
  q = fma(q, s, splat(4.677782940e-01f));
  q = fma(q, s, splat(1.0f));
  return {c * p, q};
}
static inline Vec vtanh(Vec x) {
  const Ratio t = tanh_ratio(x);
  return t.num / t.den;
}

}  // namespace godwit::kernels::GODWIT_ISA
