// See kernels/newton_schulz.h. R is the smaller side rounded up to whole vectors; the padding is zero and
// stays zero where it matters.
#include "godwit/kernels/newton_schulz.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "godwit/base/parallel.h"
#include "godwit/kernels/cpu/simd.h"

namespace godwit::kernels::GODWIT_ISA {

void newton_schulz(const NewtonSchulzParams& params);

namespace {

constexpr int kTileRows = 8;
constexpr int kTileVecs = kLanes == 16 ? 2 : 1;

// out[i, :] = sum_k a[i, k] b[k, :] for kTileRows rows from `row` and Vecs vectors of columns from `col`;
// strides lda, ldb, ldo.
template <int Vecs>
void tile(const float* a, int64_t lda, const float* b, int64_t ldb, float* out, int64_t ldo, int64_t depth,
          int64_t row, int64_t col) {
  Vec sum[kTileRows][Vecs] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Vec right[Vecs];
    for (int v = 0; v < Vecs; ++v) right[v] = load(b + k * ldb + col + v * kLanes);
    for (int i = 0; i < kTileRows; ++i) {
      const Vec left = splat(a[(row + i) * lda + k]);
      for (int v = 0; v < Vecs; ++v) sum[i][v] += left * right[v];
    }
  }
  for (int i = 0; i < kTileRows; ++i) {
    for (int v = 0; v < Vecs; ++v) store(out + (row + i) * ldo + col + v * kLanes, sum[i][v]);
  }
}

// out [rows, cols] = a [rows, depth] b [depth, cols]; rows a multiple of kTileRows, cols of kLanes.
void multiply(const float* a, int64_t lda, const float* b, int64_t ldb, float* out, int64_t ldo, int64_t rows,
              int64_t depth, int64_t cols) {
  for (int64_t row = 0; row < rows; row += kTileRows) {
    int64_t col = 0;
    for (; col + kTileVecs * kLanes <= cols; col += kTileVecs * kLanes)
      tile<kTileVecs>(a, lda, b, ldb, out, ldo, depth, row, col);
    for (; col < cols; col += kLanes) tile<1>(a, lda, b, ldb, out, ldo, depth, row, col);
  }
}

// Scratch of one thread: X [R, C] (wide orientation), its transpose, and four R x R matrices.
struct Scratch {
  Scratch(int64_t R, int64_t C) : x(R * C), xt(C * R), gram(R * R), square(R * R), product(R * R), p(R * R) {}
  std::vector<float> x, xt, gram, square, product, p;
};

int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

void one_matrix(float* m, const NewtonSchulzParams& params, int64_t r, int64_t c, int64_t R, int64_t C,
                Scratch& s) {
  constexpr float kA = 3.4445f, kB = -4.7750f, kC = 2.0315f;
  const bool tall = params.rows > params.cols;
  double square_sum = 0;
  for (int64_t i = 0; i < r * c; ++i) square_sum += static_cast<double>(m[i]) * m[i];
  const float scale = 1.0f / (static_cast<float>(std::sqrt(square_sum)) + 1e-7f);
  for (int64_t i = 0; i < r; ++i) {
    for (int64_t j = 0; j < c; ++j) {
      const float value = (tall ? m[j * r + i] : m[i * c + j]) * scale;
      s.x[i * C + j] = value;
      s.xt[j * R + i] = value;
    }
  }
  multiply(s.x.data(), C, s.xt.data(), R, s.gram.data(), R, R, c, R);
  const int64_t RR = R * R;
  for (int64_t step = 0; step < params.steps; ++step) {
    multiply(s.gram.data(), R, s.gram.data(), R, s.square.data(), R, R, R, R);
    for (int64_t i = 0; i < RR; ++i) s.square[i] = kB * s.gram[i] + kC * s.square[i];
    for (int64_t i = 0; i < R; ++i) s.square[i * R + i] += kA;  // B
    if (step == 0) {
      std::copy(s.square.begin(), s.square.end(), s.p.begin());
    } else {
      multiply(s.square.data(), R, s.p.data(), R, s.product.data(), R, R, R, R);
      std::swap(s.p, s.product);
    }
    if (step + 1 == params.steps) break;
    multiply(s.square.data(), R, s.gram.data(), R, s.product.data(), R, R, R, R);
    multiply(s.product.data(), R, s.square.data(), R, s.gram.data(), R, R, R, R);
  }
  if (params.steps == 0) {
    std::fill(s.p.begin(), s.p.end(), 0.0f);
    for (int64_t i = 0; i < R; ++i) s.p[i * R + i] = 1.0f;
  }
  if (tall) {  // (P X)^T = X^T P, P symmetric: straight into rows of m's layout
    multiply(s.xt.data(), R, s.p.data(), R, s.x.data(), R, round_up(c, kTileRows), R, R);
    for (int64_t j = 0; j < c; ++j) std::copy_n(s.x.data() + j * R, r, m + j * r);
    return;
  }
  multiply(s.p.data(), R, s.x.data(), C, s.xt.data(), C, R, R, C);
  for (int64_t i = 0; i < r; ++i) std::copy_n(s.xt.data() + i * C, c, m + i * c);
}

}  // namespace

void newton_schulz(const NewtonSchulzParams& params) {
  const int64_t r = std::min(params.rows, params.cols), c = std::max(params.rows, params.cols);
  const int64_t unit = std::max<int64_t>(kLanes, kTileRows);
  const int64_t R = round_up(r, unit), C = round_up(c, unit);
  parallel_for(0, params.n, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch(R, C);
    for (int64_t i = begin; i < end; ++i)
      one_matrix(params.batch + i * params.rows * params.cols, params, r, c, R, C, scratch);
  });
}

}  // namespace godwit::kernels::GODWIT_ISA
