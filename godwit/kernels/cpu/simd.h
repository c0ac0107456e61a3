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
  return Vec{} + x;
}

static inline float reduce_add(Vec v) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps(reinterpret_cast<__m512>(v));
#else
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  const __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_shuffle_ps(quarter, quarter, 1)));
#endif
}
static inline Vec vmax(Vec a, Vec b) {
  return a > b ? a : b;
}
static inline Vec vmin(Vec a, Vec b) {
  return a < b ? a : b;
}

// exp(x), relative error below 2 ulp on [-87.3, 88.3]; saturates outside (0 below -87.3, about 2.4e38
// above 88.3). Cody-Waite reduction by ln 2 and a degree-6 polynomial (Cephes expf).
static inline Vec vexp(Vec x) {
  const Vec clamped = vmin(vmax(x, splat(-87.3365f)), splat(88.3763f));
  const Vec shifted = clamped * splat(1.44269504f) + splat(12582912.0f);  // 1.5 * 2^23: rounds to an integer
  const Vec n = shifted - splat(12582912.0f);
  const Vec r = (clamped - n * splat(0.693359375f)) - n * splat(-2.12194440e-4f);
  Vec p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * r * r + r + splat(1.0f);
  const VecI exponent = (__builtin_convertvector(n, VecI) + 127) << 23;
  Vec scale;
  std::memcpy(&scale, &exponent, sizeof(scale));
  const Vec y = p * scale;
  return x < splat(-87.3365f) ? splat(0.0f) : y;
}
static inline Vec vsigmoid(Vec x) {
  return splat(1.0f) / (splat(1.0f) + vexp(-x));
}
// tanh by the sigmoid of 2x; absolute error below 2e-7.
static inline Vec vtanh(Vec x) {
  return splat(2.0f) * vsigmoid(x + x) - splat(1.0f);
}

}  // namespace godwit::kernels::GODWIT_ISA
