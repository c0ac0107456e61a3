// The part of a KDA chunk that does not depend on the state, shared by forward and backward. Included only by
// kernels/cpu/kda_*.cpp (see simd.h).
//
// A chunk is kKdaChunk = 16 tokens of one head; a short last chunk is filled up with tokens whose k, q and
// beta are 0 and whose decay is 1, which change nothing. With alpha_t = exp(g_t), E_ij = prod_{r=j+1..i}
// alpha_r and Gamma_i = E_i,-1 (per channel c), the chunk form of arXiv:2510.26692 reads
//   L_ij = beta_i sum_c k_ic k_jc E_ijc (i > j)     A_ij = sum_c q_ic k_jc E_ijc (i >= j)
//   X = (I + L)^-1   V~ = X Diag(beta) (V - (K Gamma) S)   O = (Q Gamma) S + A V~
//   S' = Diag(Gamma_15) S + Kbar^T V~,  Kbar_j = k_j E_15,j
// E is a running product taken pair by pair, never a quotient of two Gammas: it cannot overflow, needs no
// bound on the gate, loses no digit where the decay is strong, and a row reads nothing of later tokens.
#pragma once

#include <algorithm>

#include "godwit/kernels/cpu/gemm_tile.h"
#include "godwit/kernels/kda.h"

namespace godwit::kernels::GODWIT_ISA {

inline constexpr int kC = static_cast<int>(kKdaChunk);
inline constexpr int kScoreVectors = kC / kLanes;  // vectors of a row of a 16 x 16 matrix

// Results below 1e-38 become 0: products of strong decays would else run at the speed of denormals.
class FlushDenormals {
 public:
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  unsigned saved_;
};

// Widths padded to whole panels; what lies in the padding is zero.
struct Widths {
  int64_t key, value;  // as given
  int64_t K, V;        // padded
  explicit Widths(const KdaInputs& in)
      : key(in.key), value(in.value), K(round_up(in.key, kPanel)), V(round_up(in.value, kPanel)) {}
};

// Working arrays of one chunk. Rows are tokens. What apply_decays derives lies apart, so that a backward can
// keep several chunks and derive one at a time.
struct Chunk {
  float *q, *k, *alpha;   // [16, K] normalised (q also times K^-1/2); decay of the token
  float *L, *X, *XB, *A;  // [16, 16] L without beta, X, X Diag(beta), A
  float* beta;            // [16]
  float *qd, *kd, *kbar;  // [16, K] q Gamma, k Gamma, k E_15
  float* decay;           // [K] Gamma_15
  static int64_t kept_floats(int64_t K) { return 3 * kC * K + 4 * kC * kC + kC; }
  static int64_t derived_floats(int64_t K) { return 3 * kC * K + K; }
  static int64_t floats(int64_t K) { return kept_floats(K) + derived_floats(K); }
  Chunk(float* kept, float* derived, int64_t K) {
    const auto take = [](float*& memory, int64_t n) {
      float* p = memory;
      memory += n;
      return p;
    };
    for (float** rows : {&q, &k, &alpha}) *rows = take(kept, kC * K);
    for (float** matrix : {&L, &X, &XB, &A}) *matrix = take(kept, kC * kC);
    beta = kept;
    for (float** rows : {&qd, &kd, &kbar}) *rows = take(derived, kC * K);
    decay = derived;
  }
  Chunk(float* memory, int64_t K) : Chunk(memory, memory + kept_floats(K), K) {}
};

static inline float sigmoid(float x) {
  return 1.0f / (1.0f + std::exp(-x));
}

// What a backward needs besides: the factors of the L2 norms, and the derivatives of g by z and by A_log.
struct ChunkGrads {
  float *q_norm, *k_norm;        // [16] 1 / |q|, 1 / |k|
  float *slope_z, *slope_A_log;  // [16, K]
};

// alpha = exp(g) for a row of K channels, g as in ops.h; with kSlopes also dg/dz and dg/dA_log.
template <bool kBounded, bool kSlopes, class Load>
static inline void row_decays(const float* z, const float* bias, float* alpha, float* slope_z,
                              float* slope_A_log, int64_t K, float rate, float bound, const Load& vector) {
  for (int64_t x = 0; x < K; x += kLanes) {
    const Vec u = vector(z, x) + vector(bias, x);
    if constexpr (kBounded) {
      const Vec scaled = splat(rate) * u;
      const Vec e = vexp(-scaled), s = splat(1.0f) / (splat(1.0f) + e);
      store(alpha + x, vexp(splat(bound) * s));
      if constexpr (kSlopes) {
        const Vec slope = splat(bound) * ((e * s) * s);  // 1 - s is e s, without cancellation
        store(slope_z + x, slope * splat(rate));
        store(slope_A_log + x, slope * scaled);
      }
    } else {
      const Vec g = splat(-rate) * vsoftplus(u);
      store(alpha + x, vexp(g));
      if constexpr (kSlopes) {
        store(slope_z + x, splat(-rate) * vsigmoid(u));
        store(slope_A_log + x, g);
      }
    }
  }
}

template <bool kGrads, class Load>
static inline void load_rows(const KdaInputs& in, const Chunk& c, const ChunkGrads& g, int64_t t,
                             int64_t rows, int64_t h, int64_t K, const Load& vector) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(in.key));
  const float rate = std::exp(in.A_log[h]);
  const float* bias = in.dt_bias + h * in.key;
  for (int64_t i = 0; i < rows; ++i) {
    const float* q = in.q + (t + i) * in.q_stride + h * in.key;
    const float* k = in.k + (t + i) * in.k_stride + h * in.key;
    const float* z = in.z + (t + i) * in.z_stride + h * in.key;
    float *q_out = c.q + i * K, *k_out = c.k + i * K, *alpha = c.alpha + i * K;
    Vec qq = {}, kk = {};
    for (int64_t x = 0; x < K; x += kLanes) {
      const Vec qx = vector(q, x), kx = vector(k, x);
      qq += qx * qx;
      kk += kx * kx;
    }
    const float q_norm = 1.0f / std::sqrt(reduce_add(qq) + 1e-6f);
    const float k_norm = 1.0f / std::sqrt(reduce_add(kk) + 1e-6f);
    float *slope_z = nullptr, *slope_A_log = nullptr;
    if constexpr (kGrads) {
      g.q_norm[i] = q_norm;
      g.k_norm[i] = k_norm;
      slope_z = g.slope_z + i * K;
      slope_A_log = g.slope_A_log + i * K;
    }
    c.beta[i] = sigmoid(in.b[(t + i) * in.b_stride + h]);
    const Vec q_factor = splat(q_norm * scale), k_factor = splat(k_norm);
    for (int64_t x = 0; x < K; x += kLanes) {
      store(q_out + x, vector(q, x) * q_factor);
      store(k_out + x, vector(k, x) * k_factor);
    }
    if (in.gate_bound < 0) {
      row_decays<true, kGrads>(z, bias, alpha, slope_z, slope_A_log, K, rate, in.gate_bound, vector);
    } else {
      row_decays<false, kGrads>(z, bias, alpha, slope_z, slope_A_log, K, rate, 0, vector);
    }
  }
}

// Rows of q, k, alpha, beta for tokens t .. t + rows of head h, and with kGrads those of g.
template <bool kGrads>
static inline void load_tokens(const KdaInputs& in, const Widths& w, const Chunk& c, const ChunkGrads& g,
                               int64_t t, int64_t rows, int64_t h) {
  const int64_t key = w.key, K = w.K;
  if (key == K) {
    load_rows<kGrads>(in, c, g, t, rows, h, K, [](const float* row, int64_t x) { return load(row + x); });
  } else {  // the last vectors are partly, or all, padding
    load_rows<kGrads>(in, c, g, t, rows, h, K,
                      [key](const float* row, int64_t x) { return load_part(row + x, key - x); });
  }
}

// Tokens that change nothing behind the last one.
static inline void fill_rows(const Chunk& c, int64_t rows, int64_t K) {
  for (int64_t i = rows; i < kC; ++i) {
    c.beta[i] = 0;
    for (int64_t x = 0; x < K; x += kLanes) {
      store(c.q + i * K + x, Vec{});
      store(c.k + i * K + x, Vec{});
      store(c.alpha + i * K + x, splat(1.0f));
    }
  }
}

// qd, kd, kbar, decay.
static inline void apply_decays(const Chunk& c, int64_t K) {
  for (int64_t x = 0; x < K; x += kLanes) {
    Vec gamma = splat(1.0f);
    for (int i = 0; i < kC; ++i) {
      gamma *= load(c.alpha + i * K + x);
      store(c.qd + i * K + x, load(c.q + i * K + x) * gamma);
      store(c.kd + i * K + x, load(c.k + i * K + x) * gamma);
    }
    Vec rest = splat(1.0f);
    for (int i = kC - 1; i >= 0; --i) {
      store(c.kbar + i * K + x, load(c.k + i * K + x) * rest);
      rest *= load(c.alpha + i * K + x);
    }
    store(c.decay + x, rest);
  }
}

// Row i of the scores over kN vectors of channels from x on, as vectors still to be summed over their lanes:
// walking j down from i, `e` runs through E_ij.
template <int kN, bool kFirst>
static inline void score_row(const Chunk& c, int64_t K, int i, int64_t x, Vec (&sum_k)[kC],
                             Vec (&sum_q)[kC]) {
  Vec e[kN], ki[kN], qi[kN];
#pragma GCC unroll 8
  for (int n = 0; n < kN; ++n) {
    e[n] = splat(1.0f);
    ki[n] = load(c.k + i * K + x + n * kLanes);
    qi[n] = load(c.q + i * K + x + n * kLanes);
  }
  for (int j = i; j >= 0; --j) {
    Vec sk = kFirst ? Vec{} : sum_k[j], sq = kFirst ? Vec{} : sum_q[j];
    const float* kj = c.k + j * K + x;
    const float* aj = c.alpha + j * K + x;
#pragma GCC unroll 8
    for (int n = 0; n < kN; ++n) {
      const Vec decayed = e[n] * load(kj + n * kLanes);
      sk += ki[n] * decayed;
      sq += qi[n] * decayed;
      e[n] *= load(aj + n * kLanes);
    }
    sum_k[j] = sk;
    sum_q[j] = sq;
  }
}

// L (without beta) and A.
static inline void decayed_scores(const Chunk& c, int64_t K) {
#ifdef __AVX512F__
  constexpr int kBlock = 8;  // vectors of channels held in registers
#else
  constexpr int kBlock = 4;
#endif
  Vec sum_k[kC] = {}, sum_q[kC] = {};
  for (int i = kC - 1; i >= 0; --i) {
    int64_t x = 0;
    if (K >= kBlock * kLanes) {
      score_row<kBlock, true>(c, K, i, x, sum_k, sum_q);
      for (x += kBlock * kLanes; x + kBlock * kLanes <= K; x += kBlock * kLanes) {
        score_row<kBlock, false>(c, K, i, x, sum_k, sum_q);
      }
    } else {
      score_row<2, true>(c, K, i, x, sum_k, sum_q);
      x += 2 * kLanes;
    }
    for (; x < K; x += 2 * kLanes) score_row<2, false>(c, K, i, x, sum_k, sum_q);
    sum_k[i] = Vec{};
    for (int n = 0; n < kScoreVectors; ++n) {
      store(c.L + i * kC + n * kLanes, reduce_lanes(sum_k + n * kLanes));
      store(c.A + i * kC + n * kLanes, reduce_lanes(sum_q + n * kLanes));
    }
    sum_q[i] = Vec{};  // above the diagonal for the rows still to come
  }
}

// X = (I + Diag(beta) L)^-1 by forward substitution, row by row, and X Diag(beta).
static inline void invert(const Chunk& c) {
  Vec row[kC][kScoreVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kC; ++i) {
    Vec sum[kScoreVectors] = {};
#pragma GCC unroll 16
    for (int j = 0; j < i; ++j) {
      const Vec l = splat(c.L[i * kC + j]);
      for (int n = 0; n < kScoreVectors; ++n) sum[n] += l * row[j][n];
    }
    alignas(64) float unit[kC] = {};
    unit[i] = 1.0f;
    const Vec beta = splat(c.beta[i]);
    for (int n = 0; n < kScoreVectors; ++n) {
      row[i][n] = load(unit + n * kLanes) - beta * sum[n];
      store(c.X + i * kC + n * kLanes, row[i][n]);
      store(c.XB + i * kC + n * kLanes, row[i][n] * load(c.beta + n * kLanes));
    }
  }
}

template <bool kGrads>
static inline void prepare_chunk(const KdaInputs& in, const Widths& w, const Chunk& c, const ChunkGrads& g,
                                 int64_t t, int64_t rows, int64_t h) {
  load_tokens<kGrads>(in, w, c, g, t, rows, h);
  fill_rows(c, rows, w.K);
  apply_decays(c, w.K);
  decayed_scores(c, w.K);
  invert(c);
}

// How many heads of a sequence one thread takes at a time: their rows share the pages of memory that a chunk
// touches. Up to four, if the threads stay evenly loaded. `tasks` = sequences * heads.
static inline int64_t heads_together(int64_t heads, int64_t tasks, int threads) {
  for (const int64_t together : {4, 2}) {
    const int64_t groups = tasks / together;
    if (heads % together == 0 && (groups % threads == 0 || groups >= 4 * threads)) return together;
  }
  return 1;
}

// Memory that will be wanted soon, asked for in portions between the tiles of a product: a burst of requests
// would wait for itself. (Rows of one head lie far apart, which the hardware's prefetchers do not follow.)
class SoonList {
 public:
  // All is asked for in `portions` calls of ask().
  explicit SoonList(int64_t portions) : portions_(portions) {}
  // `rows` rows of `width` floats, `stride` floats apart; none if `from` is null.
  void add(const float* from, int64_t stride, int64_t rows, int64_t width) {
    if (rows <= 0 || from == nullptr) return;
    blocks_[count_++] = {from, stride, rows, width};
    lines_ += rows * ((width + kLine - 1) / kLine);
    portion_ = (lines_ + portions_ - 1) / portions_;
  }
  void ask() {
    for (int64_t n = 0; n < portion_ && at_ < count_; ++n) {
      const Block& b = blocks_[at_];
      __builtin_prefetch(b.from + row_ * b.stride + column_, /*write=*/0, /*to L2*/ 2);
      column_ += kLine;
      if (column_ < b.width) continue;
      column_ = 0;
      if (++row_ < b.rows) continue;
      row_ = 0;
      ++at_;
    }
  }

 private:
  static constexpr int64_t kLine = 16;
  struct Block {
    const float* from;
    int64_t stride, rows, width;
  };
  Block blocks_[8];
  int64_t count_ = 0, at_ = 0, row_ = 0, column_ = 0, lines_ = 0, portions_ = 1, portion_ = 0;
};

// Rows of a [rows, width] block with row distance `stride` <-> a [16, kPanel] tile with zeros around it.
static inline void load_panel(float* tile, const float* from, int64_t stride, int64_t rows, int64_t width) {
  for (int64_t i = 0; i < kC; ++i) {
    for (int n = 0; n < 2; ++n) {
      const int64_t left = i < rows ? width - n * kLanes : 0;
      store(tile + i * kPanel + n * kLanes, load_part(from + i * stride + n * kLanes, left));
    }
  }
}
static inline void store_panel(float* to, int64_t stride, const float* tile, int64_t rows, int64_t width) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int n = 0; n < 2; ++n) {
      store_part(to + i * stride + n * kLanes, load(tile + i * kPanel + n * kLanes), width - n * kLanes);
    }
  }
}

}  // namespace godwit::kernels::GODWIT_ISA
