// Loops over arrays whose length is no multiple of the vector.
#pragma once

#include "godwit/kernels/cpu/simd.h"

namespace godwit::kernels::GODWIT_ISA {

// The full vector's lane count as a type, so that the body is compiled without the partial case.
struct AllLanes {
  constexpr operator int64_t() const { return kLanes; }  // NOLINT: stands for a number
};

// Calls fn(offset, lanes) over [0, n): AllLanes for whole vectors, then once with the number left.
template <class Fn>
static inline void for_vectors(int64_t n, const Fn& fn) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) fn(i, AllLanes());
  if (i < n) fn(i, n - i);
}

static inline Vec load_lanes(const float* p, AllLanes) {
  return load(p);
}
static inline Vec load_lanes(const float* p, int64_t lanes) {
  return load_part(p, lanes);
}
static inline Vec load_lanes(const float* p, AllLanes, float /*fill*/) {
  return load(p);
}
// Lanes beyond the array hold `fill`.
static inline Vec load_lanes(const float* p, int64_t lanes, float fill) {
  float copy[kLanes];
  store(copy, splat(fill));
  store_part(copy, load_part(p, lanes), lanes);
  return load(copy);
}
static inline void store_lanes(float* p, Vec v, AllLanes) {
  store(p, v);
}
static inline void store_lanes(float* p, Vec v, int64_t lanes) {
  store_part(p, v, lanes);
}

}  // namespace godwit::kernels::GODWIT_ISA
