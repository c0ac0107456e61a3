// RMS normalisation, plain and gated. A row's result does not depend on the number of rows; dweight is summed
// over blocks of rows whose bounds depend on the number of rows only, then over the blocks in order.
#include "godwit/kernels/norm.h"

#include <algorithm>
#include <vector>

#include "godwit/base/parallel.h"
#include "godwit/kernels/cpu/dispatch/scratch.h"
#include "godwit/kernels/cpu/simd.h"

namespace godwit::kernels::GODWIT_ISA {
namespace {

constexpr int64_t kGrainFloats = 16384;  // below this a second thread does not pay
constexpr int64_t kMaxBlocks = 64;

// Sum over n < width of term(n, load), four partial sums wide; `load` reads a vector or what is left of one.
template <class Term>
float row_sum(int64_t width, const Term& term) {
  Vec sum[4] = {};
  int64_t n = 0;
  for (; n + 4 * kLanes <= width; n += 4 * kLanes) {
#pragma GCC unroll 4
    for (int m = 0; m < 4; ++m) {
      sum[m] += term(n + m * kLanes, [](const float* p) { return load(p); });
    }
  }
  for (; n < width; n += kLanes) {
    sum[0] += term(n, [left = width - n](const float* p) { return load_part(p, left); });
  }
  return reduce_add((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// fn(n, load, store) over the vectors of a row.
template <class Fn>
void for_row(int64_t width, const Fn& fn) {
  int64_t n = 0;
  for (; n + kLanes <= width; n += kLanes) {
    fn(
        n, [](const float* p) { return load(p); }, [](float* p, Vec v) { store(p, v); });
  }
  if (n == width) return;
  const int64_t left = width - n;
  fn(
      n, [left](const float* p) { return load_part(p, left); },
      [left](float* p, Vec v) { store_part(p, v, left); });
}

float inverse_rms(const RmsNormInputs& in, const float* x) {
  const float squares = row_sum(in.width, [&](int64_t n, const auto& get) {
    const Vec v = get(x + n);
    return v * v;
  });
  return 1.0f / std::sqrt(squares / static_cast<float>(in.width) + in.eps);
}

// One row of the backward; dweight is added to. scaled [width] is working memory.
void backward_row(const RmsNormInputs& in, const float* x, const float* gate, const float* grad,
                  float* scaled, float* dx, float* dgate, float* dweight) {
  const float* w = in.weight;
  const float r = inverse_rms(in, x);
  if (gate != nullptr) {
    for_row(in.width, [&](int64_t n, const auto& get, const auto& put) {
      const Vec e = vexp(-get(gate + n)), s = splat(1.0f) / (splat(1.0f) + e), dy = get(grad + n);
      put(dgate + n, dy * get(x + n) * splat(r) * get(w + n) * ((e * s) * s));  // 1 - s is e s
      put(scaled + n, dy * s);
    });
    grad = scaled;
  }
  const float along =
      row_sum(in.width, [&](int64_t n, const auto& get) { return get(grad + n) * get(w + n) * get(x + n); });
  const Vec back = splat(along * r * r / static_cast<float>(in.width)), rms = splat(r);
  for_row(in.width, [&](int64_t n, const auto& get, const auto& put) {
    const Vec dy = get(grad + n), xn = get(x + n);
    put(dx + n, rms * (dy * get(w + n) - xn * back));
    put(dweight + n, get(dweight + n) + dy * xn * rms);
  });
}

}  // namespace

void rms_norm_forward(const RmsNormInputs& in, float* y) {
  const int64_t grain = std::max<int64_t>(1, kGrainFloats / std::max<int64_t>(1, in.width));
  parallel_for(0, in.rows, grain, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      const float* x = in.x + i * in.x_stride;
      const float* gate = in.gate + (in.gate != nullptr ? i * in.gate_stride : 0);
      float* out = y + i * in.width;
      const Vec r = splat(inverse_rms(in, x));
      if (in.gate == nullptr) {
        for_row(in.width, [&](int64_t n, const auto& get, const auto& put) {
          put(out + n, get(x + n) * r * get(in.weight + n));
        });
      } else {
        for_row(in.width, [&](int64_t n, const auto& get, const auto& put) {
          put(out + n, get(x + n) * r * get(in.weight + n) * vsigmoid(get(gate + n)));
        });
      }
    }
  });
}

void rms_norm_backward(const RmsNormInputs& in, const float* grad, float* dx, float* dgate, float* dweight) {
  const int64_t per_block = std::max<int64_t>(16, (in.rows + kMaxBlocks - 1) / kMaxBlocks);
  const int64_t blocks = (in.rows + per_block - 1) / per_block;
  std::vector<float> partial(static_cast<size_t>(blocks * in.width), 0.0f);
  const int64_t grain = std::max<int64_t>(1, kGrainFloats / std::max<int64_t>(1, in.width * per_block));
  parallel_for(0, blocks, grain, [&](int64_t from, int64_t to) {
    float* scaled = thread_scratch(in.width);
    for (int64_t block = from; block < to; ++block) {
      for (int64_t i = block * per_block; i < std::min(in.rows, (block + 1) * per_block); ++i) {
        const float* gate = in.gate != nullptr ? in.gate + i * in.gate_stride : nullptr;
        backward_row(in, in.x + i * in.x_stride, gate, grad + i * in.width, scaled, dx + i * in.width,
                     dgate != nullptr ? dgate + i * in.width : nullptr, partial.data() + block * in.width);
      }
    }
  });
  std::fill(dweight, dweight + in.width, 0.0f);
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t n = 0; n < in.width; ++n) dweight[n] += partial[block * in.width + n];
  }
}

}  // namespace godwit::kernels::GODWIT_ISA
