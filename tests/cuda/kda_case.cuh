// Inputs of a KDA test case on the GPU, drawn from a named distribution, with NaN in the memory around them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "godwit/kernels/kda_params.h"

#define CUDA_OK(call)                                                                          \
  do {                                                                                         \
    const int error_ = int(call);                                                              \
    if (error_ != 0) {                                                                         \
      std::printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(cudaError_t(error_))); \
      std::exit(1);                                                                            \
    }                                                                                          \
  } while (0)

// Device memory with `kGuard` poisoned bytes on either side.
template <class T>
struct Buffer {
  static constexpr size_t kGuard = 65536;
  uint8_t* base = nullptr;
  size_t count = 0;
  Buffer() = default;
  explicit Buffer(size_t n) : count(n) {
    CUDA_OK(cudaMalloc(reinterpret_cast<void**>(&base), n * sizeof(T) + 2 * kGuard));
    poison();
  }
  explicit Buffer(const std::vector<T>& host) : Buffer(host.size()) { put(host); }
  Buffer(Buffer&& o) noexcept : base(o.base), count(o.count) { o.base = nullptr; }
  Buffer& operator=(Buffer&& o) noexcept {
    std::swap(base, o.base), std::swap(count, o.count);
    return *this;
  }
  ~Buffer() { cudaFree(base); }
  void poison() {
    CUDA_OK(cudaMemset(base, 0xff, count * sizeof(T) + 2 * kGuard));
  }  // all ones is a NaN in bf16, fp32 and fp64
  void zero() { CUDA_OK(cudaMemset(get(), 0, count * sizeof(T))); }
  T* get() const { return reinterpret_cast<T*>(base + kGuard); }
  void put(const std::vector<T>& host) {
    CUDA_OK(cudaMemcpy(get(), host.data(), count * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> take() const {
    std::vector<T> host(count);
    CUDA_OK(cudaMemcpy(host.data(), get(), count * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }
};

struct Case {
  std::string name;
  std::vector<int> lengths;
  int H = 2;
  std::string kind = "random";  // see draw()
  bool initial = true;
  float bound = -5.f;
  bool b_fp32 = false;  // beta logits that bf16 cannot hold
};

inline uint16_t bf16_bits(float x) {
  const __nv_bfloat16 b = __float2bfloat16(x);
  uint16_t bits;
  std::memcpy(&bits, &b, 2);
  return bits;
}
inline float bf16_value(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

struct Data {
  Case c;
  int64_t T = 0;
  std::vector<uint16_t> q, k, v, z, b, d_o;
  std::vector<float> A_log, dt_bias, initial, d_final, b_wide;
  std::vector<int64_t> cu;
};

inline Data draw(const Case& c, int seed) {
  Data d;
  d.c = c;
  d.cu.push_back(0);
  for (int n : c.lengths) d.cu.push_back(d.T += n);
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  const auto fill = [&](std::vector<uint16_t>& x, size_t n, const std::function<float(size_t)>& f) {
    x.resize(n);
    constexpr size_t kFresh = size_t{1}
                              << 23;  // the longest cases repeat themselves: drawing would take minutes
    for (size_t i = 0; i < n; ++i) x[i] = i < kFresh ? bf16_bits(f(i)) : x[i - kFresh];
  };
  const size_t wide = size_t(d.T) * c.H * 128, N = c.lengths.size();
  std::vector<float> fixed(128);
  for (float& x : fixed) x = normal(rng);
  const float size = c.kind == "norm30" ? 30.f / std::sqrt(128.f) : 1.f;
  const auto key = [&](size_t i) {
    const size_t token = i / (size_t(c.H) * 128);
    if (c.kind == "equal_keys") return fixed[i % 128] + 0.02f * normal(rng);
    if (c.kind == "zero_norm" && token % 3 == 0) return 0.f;
    return size * normal(rng);
  };
  fill(d.q, wide, key);
  fill(d.k, wide, key);
  fill(d.v, wide, [&](size_t) { return normal(rng); });
  fill(d.z, wide, [&](size_t i) {
    if (c.kind == "gate_low") return -12.f + normal(rng);  // no decay
    if (c.kind == "gate_high") return 12.f + normal(rng);  // -5 a token
    if (c.kind == "gate_mixed") return i % 7 < 3 ? 15.f : -15.f;
    return -2.f + 1.5f * normal(rng);
  });
  fill(d.b, size_t(d.T) * c.H, [&](size_t) {
    if (c.kind == "beta_low") return -12.f + normal(rng);
    if (c.kind == "beta_high" || c.kind == "equal_keys") return 8.f + normal(rng);
    return normal(rng);
  });
  for (uint16_t x : d.b) d.b_wide.push_back(bf16_value(x) + 0.01f * normal(rng));
  fill(d.d_o, wide, [&](size_t) { return normal(rng); });
  d.A_log.resize(c.H), d.dt_bias.resize(size_t(c.H) * 128);
  for (float& x : d.A_log) x = 0.3f * normal(rng);
  for (float& x : d.dt_bias) x = 0.5f * normal(rng);
  const auto state = [&](std::vector<float>& x) {
    x.resize(N * c.H * 128 * 128);
    for (float& y : x) y = 0.3f * normal(rng);
  };
  if (c.initial) state(d.initial), state(d.d_final);
  return d;
}

// The data on the device, and the kernels' view of it.
struct DeviceCase {
  Buffer<uint16_t> q, k, v, z, b, d_o;
  Buffer<float> A_log, dt_bias, initial, d_final, b_wide;
  Buffer<int64_t> cu;
  godwit::kernels::cuda::KdaInputs in;
  explicit DeviceCase(const Data& d)
      : q(d.q),
        k(d.k),
        v(d.v),
        z(d.z),
        b(d.b),
        d_o(d.d_o),
        A_log(d.A_log),
        dt_bias(d.dt_bias),
        initial(d.initial),
        d_final(d.d_final),
        b_wide(d.b_wide),
        cu(d.cu) {
    in.q = q.get(), in.k = k.get(), in.v = v.get(), in.z = z.get(), in.b = b.get();
    in.A_log = A_log.get(), in.dt_bias = dt_bias.get();
    in.initial_state = d.c.initial ? initial.get() : nullptr;
    in.cu_seqlens = cu.get();
    in.T = d.T, in.N = int(d.c.lengths.size()), in.H = d.c.H;
    for (int n : d.c.lengths) in.max_length = n > in.max_length ? n : in.max_length;
    in.gate_bound = d.c.bound;
    if (d.c.b_fp32) in.b = b_wide.get(), in.b_fp32 = true;
  }
};

// |x - ref| / |ref| over all elements; NaN counts as infinite.
template <class T>
double relative_error(const std::vector<T>& x, const std::vector<double>& ref) {
  double diff = 0, size = 0;
  for (size_t i = 0; i < ref.size(); ++i) {
    double value;
    if constexpr (sizeof(T) == 2)
      value = bf16_value(x[i]);
    else
      value = double(x[i]);
    if (!std::isfinite(value)) return INFINITY;
    diff += (value - ref[i]) * (value - ref[i]), size += ref[i] * ref[i];
  }
  return size == 0 ? std::sqrt(diff) : std::sqrt(diff / size);
}
