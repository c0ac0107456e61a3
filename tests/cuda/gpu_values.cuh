// Random values for the stand-alone GPU programs.
#pragma once

#include "godwit/kernels/layer_gpu.h"
#include "tests/cuda/kda_case.cuh"

using Bits = std::vector<uint16_t>;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

inline std::mt19937& generator() {
  static std::mt19937 rng(7);
  return rng;
}

// Long arrays repeat themselves after this many values: drawing would take minutes.
constexpr size_t kFreshValues = (size_t{1} << 20) + 7;

inline Floats floats(size_t n, float size = 1, float middle = 0) {
  std::normal_distribution<float> normal;
  Floats x(n);
  for (size_t i = 0; i < n; ++i)
    x[i] = i < kFreshValues ? middle + size * normal(generator()) : x[i - kFreshValues];
  return x;
}
inline Bits halves(size_t n, float size = 1) {
  std::normal_distribution<float> normal;
  Bits x(n);
  for (size_t i = 0; i < n; ++i)
    x[i] = i < kFreshValues ? bf16_bits(size * normal(generator())) : x[i - kFreshValues];
  return x;
}
inline Doubles wide(const Bits& x) {
  Doubles y(x.size());
  for (size_t i = 0; i < x.size(); ++i) y[i] = bf16_value(x[i]);
  return y;
}

// A parameter vector of either type.
struct Weights {
  Buffer<float> full;
  Buffer<uint16_t> half;
  Doubles values;
  godwit::kernels::cuda::WeightVector view;
  Weights(size_t n, bool bf16, float size = 0.5f) {
    const Bits bits = halves(n, size);
    const Floats f = floats(n, size, size);
    half = Buffer<uint16_t>(bits), full = Buffer<float>(f);
    values = bf16 ? wide(bits) : Doubles(f.begin(), f.end());
    view = {bf16 ? static_cast<const void*>(half.get()) : full.get(), bf16};
  }
};
