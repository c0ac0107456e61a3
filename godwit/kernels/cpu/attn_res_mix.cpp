// Each source row is read from memory once; the second sweep over it (weighted sum, or gradients) finds it in
// the first-level cache.
#include "godwit/kernels/cpu/attn_res_mix_isa.h"
#include "godwit/kernels/cpu/lanes.h"

namespace godwit::kernels::GODWIT_ISA {
namespace {

// Scores to weights, in place.
void softmax(int64_t n, float* x) {
  float largest = x[0];
  for (int64_t i = 1; i < n; ++i) largest = x[i] > largest ? x[i] : largest;
  float sum = 0;
  for_vectors(n, [&](int64_t i, auto lanes) {
    const Vec e = vexp(load_lanes(x + i, lanes) - splat(largest));
    store_lanes(x + i, e, lanes);
    for (int64_t j = 0; j < lanes; ++j) sum += x[i + j];
  });
  const float inverse = 1 / sum;
  for (int64_t i = 0; i < n; ++i) x[i] *= inverse;
}

}  // namespace

void mix_fwd_range(const MixForward& a, int64_t begin, int64_t end, float* alpha) {
  const float per_width = 1.0f / static_cast<float>(a.width);
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t s = 0; s < a.sources; ++s) {
      const float* v = a.v[s] + t * a.width;
      Vec dot = {}, square = {};
      for_vectors(a.width, [&](int64_t i, auto lanes) {
        const Vec x = load_lanes(v + i, lanes);
        dot = fma(x, load_lanes(a.key + i, lanes), dot);
        square = fma(x, x, square);
      });
      alpha[s] = reduce_add(dot) / __builtin_sqrtf(reduce_add(square) * per_width + a.eps);
    }
    softmax(a.sources, alpha);
    for_vectors(a.width, [&](int64_t i, auto lanes) {
      Vec sum = {};
      for (int64_t s = 0; s < a.sources; ++s) {
        sum = fma(splat(alpha[s]), load_lanes(a.v[s] + t * a.width + i, lanes), sum);
      }
      store_lanes(a.out + t * a.width + i, sum, lanes);
    });
  }
}

// With b_s = alpha_s (d out . v_s - sum_j alpha_j d out . v_j), the gradient of score_s:
//   d v_s = alpha_s d out + b_s r_s (key - score_s r_s v_s / D),  d key = sum_s b_s r_s v_s
void mix_bwd_range(const MixBackward& a, int64_t begin, int64_t end, float* d_key, float* scratch) {
  const float per_width = 1.0f / static_cast<float>(a.width);
  float* alpha = scratch;
  float* along = alpha + a.sources;     // d out . v_s
  float* by_key = along + a.sources;    // b_s r_s
  float* by_self = by_key + a.sources;  // -b_s r_s^2 score_s / D
  float* rstd = by_self + a.sources;
  float* score = rstd + a.sources;
  std::memset(d_key, 0, a.width * sizeof(float));
  for (int64_t t = begin; t < end; ++t) {
    const float* d_out = a.d_out + t * a.width;
    for (int64_t s = 0; s < a.sources; ++s) {
      const float* v = a.v[s] + t * a.width;
      Vec dot = {}, square = {}, d = {};
      for_vectors(a.width, [&](int64_t i, auto lanes) {
        const Vec x = load_lanes(v + i, lanes);
        dot = fma(x, load_lanes(a.key + i, lanes), dot);
        square = fma(x, x, square);
        d = fma(x, load_lanes(d_out + i, lanes), d);
      });
      rstd[s] = 1.0f / __builtin_sqrtf(reduce_add(square) * per_width + a.eps);
      score[s] = alpha[s] = reduce_add(dot) * rstd[s];
      along[s] = reduce_add(d);
    }
    softmax(a.sources, alpha);
    float mean = 0;
    for (int64_t s = 0; s < a.sources; ++s) mean += alpha[s] * along[s];
    for (int64_t s = 0; s < a.sources; ++s) {
      by_key[s] = alpha[s] * (along[s] - mean) * rstd[s];
      by_self[s] = -by_key[s] * score[s] * rstd[s] * per_width;
    }
    for_vectors(a.width, [&](int64_t i, auto lanes) {
      const Vec d = load_lanes(d_out + i, lanes), key = load_lanes(a.key + i, lanes);
      Vec sum = load_lanes(d_key + i, lanes);
      for (int64_t s = 0; s < a.sources; ++s) {
        const Vec v = load_lanes(a.v[s] + t * a.width + i, lanes);
        sum = fma(splat(by_key[s]), v, sum);
        if (a.d_v[s] == nullptr) continue;
        const Vec d_v = fma(splat(alpha[s]), d, fma(splat(by_key[s]), key, splat(by_self[s]) * v));
        store_lanes(a.d_v[s] + t * a.width + i, d_v, lanes);
      }
      store_lanes(d_key + i, sum, lanes);
    });
  }
}

}  // namespace godwit::kernels::GODWIT_ISA
