// Inputs of a test case of the experts on the GPU, and their fp64 reference.
#pragma once

#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "godwit/kernels/moe_experts_cuda.h"
#include "tests/cuda/kda_case.cuh"

using godwit::kernels::MoeShape;

inline uint8_t* align(uint8_t* p) {
  return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(p) + 255) / 256 * 256);
}

// A normal deviate from a counter (Box-Muller over two hashes).
__device__ inline float deviate(uint64_t i, uint32_t seed) {
  const auto hash = [](uint64_t x) {
    x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull;
    return x ^ (x >> 33);
  };
  const uint64_t h = hash(i * 0x9e3779b97f4a7c15ull + seed);
  const float u = (uint32_t(h) + 1.f) * 0x1p-32f, v = uint32_t(h >> 32) * 0x1p-32f;
  return sqrtf(-2.f * logf(fminf(u, 1.f))) * cospif(2.f * v);
}
__global__ void fill_normal(uint16_t* x, int64_t n, float scale, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n;
       i += int64_t(gridDim.x) * blockDim.x)
    x[i] = __bfloat16_as_ushort(__float2bfloat16(scale * deviate(i, seed)));
}
inline Buffer<uint16_t> normal(int64_t n, float scale, uint32_t seed) {
  Buffer<uint16_t> x(n);
  fill_normal<<<2048, 256>>>(x.get(), n, scale, seed);
  return x;
}

__device__ inline double wide(uint16_t x) {
  return __bfloat162float(__ushort_as_bfloat16(x));
}
struct Glu64 {
  double value, d_gate, d_up;
};
__device__ inline Glu64 glu64(double g, double u, double bg, double bu) {
  const double s = 1 / (1 + exp(-g));
  const double tg = bg > 0 ? tanh(g / bg) : 0, tu = bu > 0 ? tanh(u / bu) : 0;
  const double h = bg > 0 ? bg * tg : g, lin = bu > 0 ? bu * tu : u;
  return {h * s * lin, lin * s * (1 - tg * tg + h * (1 - s)), h * s * (1 - tu * tu)};
}
// One thread an element; slot = t k + i.
struct ReferenceArgs {
  MoeShape s;
  const uint16_t *z, *w1, *w3, *w2, *d_out;
  const int32_t* experts;
  const float* weights;
  double *a, *d_act, *dg, *du;  // [slots, I]
  double *out, *d_z, *d_weights, *dw1, *dw3, *dw2;
};
__device__ inline int64_t thread_index() {
  return blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
}
__global__ void reference_inner(ReferenceArgs r) {
  const int64_t at = thread_index(), slot = at / r.s.inner, i = at % r.s.inner;
  if (slot >= r.s.tokens * r.s.k) return;
  const int64_t e = r.experts[slot], row = (e * r.s.inner + i) * r.s.width;
  const uint16_t *z = r.z + slot / r.s.k * r.s.width, *d = r.d_out + slot / r.s.k * r.s.width;
  double g = 0, u = 0, da = 0;
  for (int64_t l = 0; l < r.s.width; ++l) {
    g += wide(r.w1[row + l]) * wide(z[l]), u += wide(r.w3[row + l]) * wide(z[l]);
    da += wide(r.w2[(e * r.s.width + l) * r.s.inner + i]) * wide(d[l]);
  }
  const Glu64 f = glu64(g, u, r.s.form.beta_gate, r.s.form.beta_up);
  const double p = r.weights[slot];
  r.a[at] = f.value, r.d_act[at] = da, r.dg[at] = p * da * f.d_gate, r.du[at] = p * da * f.d_up;
}
__global__ void reference_outer(ReferenceArgs r) {
  const int64_t at = thread_index(), t = at / r.s.width, l = at % r.s.width;
  if (t >= r.s.tokens) return;
  double out = 0, dz = 0;
  for (int64_t slot = t * r.s.k; slot < (t + 1) * r.s.k; ++slot) {
    const int64_t e = r.experts[slot];
    double y = 0;
    for (int64_t j = 0; j < r.s.inner; ++j) {
      const int64_t w = (e * r.s.inner + j) * r.s.width + l, x = slot * r.s.inner + j;
      y += wide(r.w2[(e * r.s.width + l) * r.s.inner + j]) * r.a[x];
      dz += wide(r.w1[w]) * r.dg[x] + wide(r.w3[w]) * r.du[x];
    }
    out += r.weights[slot] * y;
  }
  r.out[at] = out, r.d_z[at] = dz;
}
__global__ void reference_weights(ReferenceArgs r) {
  const int64_t at = thread_index(), l = at % r.s.width, j = at / r.s.width % r.s.inner,
                e = at / r.s.width / r.s.inner;
  if (e >= r.s.experts) return;
  double w1 = 0, w3 = 0, w2 = 0;
  for (int64_t slot = 0; slot < r.s.tokens * r.s.k; ++slot) {
    if (r.experts[slot] != e) continue;
    const int64_t x = slot * r.s.inner + j, t = slot / r.s.k;
    const double z = wide(r.z[t * r.s.width + l]);
    w1 += r.dg[x] * z, w3 += r.du[x] * z, w2 += wide(r.d_out[t * r.s.width + l]) * r.weights[slot] * r.a[x];
  }
  r.dw1[at] = w1, r.dw3[at] = w3, r.dw2[(e * r.s.width + l) * r.s.inner + j] = w2;
}
__global__ void reference_dots(ReferenceArgs r) {
  const int64_t slot = thread_index();
  if (slot >= r.s.tokens * r.s.k) return;
  double sum = 0;
  for (int64_t j = 0; j < r.s.inner; ++j) sum += r.a[slot * r.s.inner + j] * r.d_act[slot * r.s.inner + j];
  r.d_weights[slot] = sum;
}

// Random codes, and scales about 2^-7.
__global__ void fill_packed(uint8_t* codes, int64_t n, uint8_t* scales, int64_t m, uint32_t seed) {
  for (int64_t i = thread_index(); i < n; i += int64_t(gridDim.x) * blockDim.x)
    codes[i] = uint8_t(uint64_t(i * 0x9e3779b97f4a7c15ull + seed * 0xd1b54a32d192ed03ull) >> 53);
  for (int64_t i = thread_index(); i < m; i += int64_t(gridDim.x) * blockDim.x)
    scales[i] = uint8_t(118 + (uint64_t(i * 0x9e3779b97f4a7c15ull + seed) >> 50) % 3);
}
__global__ void unpack_packed(const uint8_t* codes, const uint8_t* scales, uint16_t* out, int64_t n) {
  const float magnitude[8] = {0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};
  for (int64_t i = thread_index(); i < n; i += int64_t(gridDim.x) * blockDim.x) {
    const int code = codes[i / 2] >> (i % 2 * 4) & 15;
    const float v = ldexpf(magnitude[code & 7], int(scales[i / 32]) - 127);
    out[i] = __bfloat16_as_ushort(__float2bfloat16(code & 8 ? -v : v));
  }
}

// Random integers, and scales about 2^-7 that are no powers of two; their products rounded to bf16.
__global__ void fill_int8(int8_t* values, float* scales, uint16_t* out, int64_t rows, int64_t columns,
                          uint32_t seed) {
  for (int64_t i = thread_index(); i < rows * columns; i += int64_t(gridDim.x) * blockDim.x) {
    const float s = 0.3f / 127 / sqrtf(float(columns)) * (4 + (i / columns * 7 + seed) % 13);
    const int v = max(-128, min(127, int(rintf(40 * deviate(i, seed)))));
    values[i] = int8_t(v), out[i] = __bfloat16_as_ushort(__float2bfloat16(s * float(v)));
    if (i % columns == 0) scales[i / columns] = s;
  }
}

struct Reference {
  std::vector<double> out, d_z, d_weights, dw1, dw3, dw2;
};

enum class Spread { kRandom, kOne, kSkewed };

struct ExpertCase {
  std::string name;
  MoeShape shape;
  std::vector<int32_t> choices;
  Buffer<uint16_t> z, w1, w3, w2, d_out;
  Buffer<uint8_t> c1, c3, c2, s1, s3, s2;  // MXFP4, if packed: then w1, w3, w2 are their values
  Buffer<float> f1, f3, f2;                // int8, if packed so: then c1, c3, c2 are its bytes
  Buffer<int32_t> experts;
  Buffer<float> weights;

  ExpertCase(std::string label, const MoeShape& s, Spread spread, int seed)
      : name(std::move(label)), shape(s) {
    const char* kinds[] = {"random", "one", "skewed"};
    name += " T " + std::to_string(s.tokens) + " k " + std::to_string(s.k) + " E " +
            std::to_string(s.experts) + " L " + std::to_string(s.width) + " I " + std::to_string(s.inner) +
            " " + kinds[int(spread)];
    std::mt19937 random(seed);
    std::vector<float> p;
    for (int64_t t = 0; t < s.tokens; ++t) {
      std::vector<int32_t> chosen;
      while (int64_t(chosen.size()) < s.k) {
        const double u = std::uniform_real_distribution<>(0, 1)(random);
        const double v = spread == Spread::kSkewed ? u * u * u : u;
        int32_t e = std::min(int32_t(v * double(s.experts)), int32_t(s.experts - 1));
        if (spread == Spread::kOne && chosen.empty()) e = 1;
        if (std::find(chosen.begin(), chosen.end(), e) == chosen.end()) chosen.push_back(e);
      }
      for (const int32_t e : chosen)
        choices.push_back(e), p.push_back(std::uniform_real_distribution<float>(0, 1)(random));
    }
    z = normal(s.tokens * s.width, 1.f, 4 * seed);
    w1 = normal(s.experts * s.inner * s.width, 1.5f / std::sqrt(float(s.width)), 4 * seed + 1);
    w3 = normal(s.experts * s.inner * s.width, 1.5f / std::sqrt(float(s.width)), 4 * seed + 2);
    w2 = normal(s.experts * s.inner * s.width, 1.f / std::sqrt(float(s.inner)), 4 * seed + 3);
    d_out = normal(s.tokens * s.width, 1.f, 4 * seed + 77);
    experts = Buffer<int32_t>(choices), weights = Buffer<float>(p);
    CUDA_OK(cudaDeviceSynchronize());
  }

  double used_experts() const {
    std::vector<int32_t> all = choices;
    std::sort(all.begin(), all.end());
    return double(std::unique(all.begin(), all.end()) - all.begin());
  }

  // Tokens `from` to `from + tokens`.
  godwit::kernels::cuda::MoeForwardParams forward(int64_t from, int64_t tokens) const {
    godwit::kernels::cuda::MoeForwardParams p;
    p.shape = shape, p.shape.tokens = tokens;
    p.w = {.w1 = w1.get(), .w3 = w3.get(), .w2 = w2.get(), .format = godwit::kernels::MoeFormat::kBf16};
    if (c1.count > 0) {
      p.w = {.w1 = c1.get(),
             .w3 = c3.get(),
             .w2 = c2.get(),
             .s1 = s1.get(),
             .s3 = s3.get(),
             .s2 = s2.get(),
             .format = godwit::kernels::MoeFormat::kMxfp4};
    }
    if (f1.count > 0) {
      p.w.s1 = f1.get(), p.w.s3 = f3.get(), p.w.s2 = f2.get();
      p.w.format = godwit::kernels::MoeFormat::kInt8;
    }
    p.z = z.get() + from * shape.width;
    p.experts = experts.get() + from * shape.k, p.weights = weights.get() + from * shape.k;
    return p;
  }

  void pack(bool keep_values = true) {
    const int64_t n = shape.experts * shape.inner * shape.width;
    int seed = 1;
    const auto one = [&](Buffer<uint8_t>& codes, Buffer<uint8_t>& scales, Buffer<uint16_t>& values) {
      codes = Buffer<uint8_t>(n / 2), scales = Buffer<uint8_t>(n / 32);
      fill_packed<<<2048, 256>>>(codes.get(), n / 2, scales.get(), n / 32, seed++);
      if (keep_values) unpack_packed<<<2048, 256>>>(codes.get(), scales.get(), values.get(), n);
    };
    one(c1, s1, w1), one(c3, s3, w3), one(c2, s2, w2);
    CUDA_OK(cudaDeviceSynchronize());
    name += " MXFP4";
  }

  void pack_int8() {
    int seed = 1;
    const auto one = [&](Buffer<uint8_t>& bytes, Buffer<float>& scales, Buffer<uint16_t>& values,
                         int64_t rows, int64_t columns) {
      bytes = Buffer<uint8_t>(rows * columns), scales = Buffer<float>(rows);
      fill_int8<<<2048, 256>>>(reinterpret_cast<int8_t*>(bytes.get()), scales.get(), values.get(), rows,
                               columns, seed++);
    };
    one(c1, f1, w1, shape.experts * shape.inner, shape.width);
    one(c3, f3, w3, shape.experts * shape.inner, shape.width);
    one(c2, f2, w2, shape.experts * shape.width, shape.inner);
    CUDA_OK(cudaDeviceSynchronize());
    name += " int8";
  }

  Reference reference(bool gradients) const {
    const int64_t slots = shape.tokens * shape.k, inner = slots * shape.inner,
                  outer = shape.tokens * shape.width,
                  all = gradients ? shape.experts * shape.inner * shape.width : 0;
    const Buffer<double> a(inner), d_act(inner), dg(inner), du(inner), out(outer), d_z(outer),
        d_weights(slots), dw1(all), dw3(all), dw2(all);
    const ReferenceArgs r{shape,         z.get(),       w1.get(),        w3.get(),    w2.get(),  d_out.get(),
                          experts.get(), weights.get(), a.get(),         d_act.get(), dg.get(),  du.get(),
                          out.get(),     d_z.get(),     d_weights.get(), dw1.get(),   dw3.get(), dw2.get()};
    const auto blocks = [](int64_t n) { return unsigned((n + 127) / 128); };
    reference_inner<<<blocks(inner), 128>>>(r);
    reference_outer<<<blocks(outer), 128>>>(r);
    reference_dots<<<blocks(slots), 128>>>(r);
    if (gradients) reference_weights<<<blocks(all), 128>>>(r);
    CUDA_OK(cudaDeviceSynchronize());
    return {out.take(), d_z.take(), d_weights.take(), dw1.take(), dw3.take(), dw2.take()};
  }
};

inline int failures = 0;

inline void expect(bool ok, const std::string& what) {
  if (!ok) ++failures, std::printf("  FAILED: %s\n", what.c_str());
}

// What tokens from .. from + tokens of the case give: alone, without the rest of it.
inline std::vector<uint16_t> run_forward(const ExpertCase& c, int64_t from, int64_t tokens) {
  godwit::kernels::cuda::MoeForwardParams p = c.forward(from, tokens);
  const Buffer<uint16_t> out(tokens * c.shape.width);
  const Buffer<uint8_t> space(godwit::kernels::cuda::moe_experts_fwd_workspace_bytes(p.shape) + 256);
  p.out = out.get(), p.workspace = align(space.get());
  CUDA_OK(godwit::kernels::cuda::moe_experts_fwd(p));
  CUDA_OK(cudaDeviceSynchronize());
  return out.take();
}
