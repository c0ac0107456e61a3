// What the backward of KDA does with one chunk. Included only by kda_bwd.cpp. Notation of kda_tile.h; dS' is
// the gradient of the state that the chunk leaves.
//   dV~ = A^T dO + Kbar dS'      dY = X^T dV~       dR = Diag(beta) dY = dV
//   dA = tril(dO V~^T)           dL = -stril(dY V~^T)    (X (Diag(beta) R) = V~, so no R is needed)
//   d(Q Gamma) = dO S^T          d(K Gamma) = -dR S^T    dKbar = V~ dS'^T
//   dS = Diag(Gamma_15) dS' + (Q Gamma)^T dO - (K Gamma)^T dR
// and pair by pair, with a = dA_ij, p = beta_i dL_ij, E = E_ij:
//   dq_i += a k_j E   dk_i += p k_j E   dk_j += (a q_i + p k_i) E
// The gradient of g_t collects every product that contains alpha_t, per channel, by sums without differences
// (a shut gate gets exactly 0):
//   dg_t = Gamma_15 rowsum(S dS') + sum_{i < t} Kbar_i dKbar_i + sum_{i >= t} (Q Gamma)_i d(Q Gamma)_i
//          + sum_{i >= t} (K Gamma)_i d(K Gamma)_i + sum_{i >= t > j} (a q_i + p k_i) k_j E_ij
//
// States and their gradients are held transposed, in panels of kPanel key channels, [K / kPanel][V][kPanel]:
// every product with them is then a broadcast from the left times a vector from the right.
#pragma once

#include "godwit/kernels/cpu/kda_tile.h"

namespace godwit::kernels::GODWIT_ISA {

inline constexpr int kSegmentChunks = static_cast<int>(kKdaSegment / kKdaChunk);

// Arrays that one thread works with.
struct Work {
  float* chunk[kSegmentChunks];  // what is kept of a Chunk
  float* derived;                // the rest, of one chunk at a time
  ChunkGrads grads[kSegmentChunks];
  float* state[kSegmentChunks];        // S^T entering each chunk
  float* v_new[kSegmentChunks];        // [16, V]
  float* dstate;                       // dS'^T
  float* kbar_t;                       // [K, 16]
  float* dv_t;                         // [V, 16]
  float *dO, *dv_new, *dY, *minus_dR;  // [16, V]
  float *dqd, *dkd, *dkbar;            // [16, K]
  float *dk_row, *dk_col;              // [16, K]
  float* dg;                           // [16, K]
  float* decay_sum;                    // [K] rowsum(S dS')
  float *dA, *dP;                      // [16, 16]
  float* dbeta;                        // [16]

  static int64_t floats(const Widths& w) {
    const int64_t chunk = Chunk::kept_floats(w.K) + 2 * kC * w.K + 2 * kC + w.K * w.V + kC * w.V;
    return kSegmentChunks * chunk + Chunk::derived_floats(w.K) + w.K * w.V + kC * (w.K + w.V) + 4 * kC * w.V +
           6 * kC * w.K + w.K + 2 * kC * kC + kC;
  }
  Work(float* memory, const Widths& w) {
    const auto take = [&](int64_t n) {
      float* p = memory;
      memory += n;
      return p;
    };
    for (int i = 0; i < kSegmentChunks; ++i) {
      chunk[i] = take(Chunk::kept_floats(w.K));
      grads[i] = {take(kC), take(kC), take(kC * w.K), take(kC * w.K)};
      state[i] = take(w.K * w.V);
      v_new[i] = take(kC * w.V);
    }
    derived = take(Chunk::derived_floats(w.K));
    dstate = take(w.K * w.V);
    kbar_t = take(kC * w.K);
    dv_t = take(kC * w.V);
    for (float** rows : {&dO, &dv_new, &dY, &minus_dR}) *rows = take(kC * w.V);
    for (float** rows : {&dqd, &dkd, &dkbar, &dk_row, &dk_col, &dg}) *rows = take(kC * w.K);
    decay_sum = take(w.K);
    dA = take(kC * kC);
    dP = take(kC * kC);
    dbeta = take(kC);
  }
};

// A head's state [K, V] (null = zeros) <-> its transpose in panels.
static inline void load_transposed(float* panels, const float* from, const Widths& w) {
  for (int64_t x = 0; x < w.K; x += kLanes) {
    for (int64_t v = 0; v < w.V; v += kLanes) {
      Vec block[kLanes];
      for (int64_t m = 0; m < kLanes; ++m) {
        const bool inside = from != nullptr && x + m < w.key;
        block[m] = inside ? load_part(from + (x + m) * w.value + v, w.value - v) : Vec{};
      }
      transpose_lanes(block);
      float* to = panels + x / kPanel * kPanel * w.V + x % kPanel;
      for (int64_t m = 0; m < kLanes; ++m) store(to + (v + m) * kPanel, block[m]);
    }
  }
}
static inline void store_transposed(float* to, const float* panels, const Widths& w) {
  for (int64_t x = 0; x < w.K; x += kLanes) {
    const float* from = panels + x / kPanel * kPanel * w.V + x % kPanel;
    for (int64_t v = 0; v < w.V; v += kLanes) {
      Vec block[kLanes];
      for (int64_t m = 0; m < kLanes; ++m) block[m] = load(from + (v + m) * kPanel);
      transpose_lanes(block);
      for (int64_t m = 0; m < kLanes && x + m < w.key; ++m) {
        store_part(to + (x + m) * w.value + v, block[m], w.value - v);
      }
    }
  }
}

// Rows t .. t + rows of head h of a [T, H, V] array (null = zeros) into [16, V], zeros around them.
static inline void load_values(float* to, const float* from, int64_t stride, int64_t rows, const Widths& w) {
  for (int64_t i = 0; i < kC; ++i) {
    for (int64_t v = 0; v < w.V; v += kLanes) {
      const int64_t left = from != nullptr && i < rows ? w.value - v : 0;
      store(to + i * w.V + v, left > 0 ? load_part(from + i * stride + v, left) : Vec{});
    }
  }
}

// to [16, 16]-blocked transpose of a [16, n] array: [n, 16]; and back.
static inline void transpose_rows(float* to, const float* from, int64_t n) {
  for (int64_t x = 0; x < n; x += kLanes) {
    for (int i = 0; i < kC; i += kLanes) {
      Vec block[kLanes];
      for (int m = 0; m < kLanes; ++m) block[m] = load(from + (i + m) * n + x);
      transpose_lanes(block);
      for (int m = 0; m < kLanes; ++m) store(to + (x + m) * kC + i, block[m]);
    }
  }
}
static inline void transpose_columns(float* to, const float* from, int64_t n) {
  for (int64_t x = 0; x < n; x += kLanes) {
    for (int i = 0; i < kC; i += kLanes) {
      Vec block[kLanes];
      for (int m = 0; m < kLanes; ++m) block[m] = load(from + (x + m) * kC + i);
      transpose_lanes(block);
      for (int m = 0; m < kLanes; ++m) store(to + (i + m) * n + x, block[m]);
    }
  }
}

// next = Diag(Gamma_15) state + Kbar^T V~, all transposed.
static inline void advance_state(float* next, const float* state, const Chunk& c, const float* v_new,
                                 const Widths& w) {
  for (int64_t x = 0; x < w.K; x += kPanel) {
    const Vec decay[2] = {load(c.decay + x), load(c.decay + x + kLanes)};
    for (int64_t v = 0; v < w.V; v += kTileRows) {
      const int64_t at = x * w.V + v * kPanel;
      Vec acc[kTileRows][2];
      for (int m = 0; m < kTileRows; ++m) {
        for (int n = 0; n < 2; ++n) acc[m][n] = decay[n] * load(state + at + m * kPanel + n * kLanes);
      }
      madd_tile(acc, v_new + v, 1, w.V, c.kbar + x, w.K, kC);
      for (int m = 0; m < kTileRows; ++m) {
        for (int n = 0; n < 2; ++n) store(next + at + m * kPanel + n * kLanes, acc[m][n]);
      }
    }
  }
}

// out [16, width] = left [16, depth] right, right in panels [width / kPanel][depth][kPanel].
static inline void rows_times_panels(float* out, const float* left, const float* right, int64_t depth,
                                     int64_t width, SoonList& soon) {
  for (int64_t x = 0; x < width; x += kPanel) {
    for (int i = 0; i < kC; i += kTileRows) {
      soon.ask();
      Vec acc[kTileRows][2] = {};
      madd_tile(acc, left + i * depth, depth, 1, right + x * depth, kPanel, depth);
      for (int m = 0; m < kTileRows; ++m) {
        for (int n = 0; n < 2; ++n) store(out + (i + m) * width + x + n * kLanes, acc[m][n]);
      }
    }
  }
}

// dV~ = A^T dO + Kbar dS', then dY and -dR.
static inline void value_grads(const Work& s, const Chunk& c, const Widths& w) {
#ifdef __AVX512F__
  constexpr int kRows = 16;
#else
  constexpr int kRows = 4;
#endif
  transpose_rows(s.kbar_t, c.kbar, w.K);
  for (int64_t v = 0; v < w.V; v += kRows) {
    Vec acc[kRows][kScoreVectors] = {};
    for (int64_t x = 0; x < w.K; x += kPanel) {
      madd_tile(acc, s.dstate + x * w.V + v * kPanel, kPanel, 1, s.kbar_t + x * kC, kC, kPanel);
    }
    for (int m = 0; m < kRows; ++m) {
      for (int n = 0; n < kScoreVectors; ++n) store(s.dv_t + (v + m) * kC + n * kLanes, acc[m][n]);
    }
  }
  transpose_columns(s.dv_new, s.dv_t, w.V);
  for (int64_t v = 0; v < w.V; v += kPanel) {
    for (int j = 0; j < kC; j += kTileRows) {
      Vec acc[kTileRows][2];
      float* out = s.dv_new + j * w.V + v;
      for (int m = 0; m < kTileRows; ++m) {
        for (int n = 0; n < 2; ++n) acc[m][n] = load(out + m * w.V + n * kLanes);
      }
      madd_tile(acc, c.A + j * kC + j, 1, kC, s.dO + j * w.V + v, w.V, kC - j);
      for (int m = 0; m < kTileRows; ++m) {
        for (int n = 0; n < 2; ++n) store(out + m * w.V + n * kLanes, acc[m][n]);
      }
    }
    for (int j = 0; j < kC; j += kTileRows) {
      Vec acc[kTileRows][2] = {};
      madd_tile(acc, c.X + j * kC + j, 1, kC, s.dv_new + j * w.V + v, w.V, kC - j);
      for (int m = 0; m < kTileRows; ++m) {
        const Vec beta = splat(-c.beta[j + m]);
        for (int n = 0; n < 2; ++n) {
          const int64_t at = (j + m) * w.V + v + n * kLanes;
          store(s.dY + at, acc[m][n]);
          store(s.minus_dR + at, beta * acc[m][n]);
        }
      }
    }
  }
}

// Row i of dO V~^T and dY V~^T over kN vectors of columns from x on, still to be summed over the lanes.
template <int kN, bool kFirst>
static inline void score_grad_row(const Work& s, const float* v_new, int64_t V, int i, int64_t x,
                                  Vec (&sum_o)[kC], Vec (&sum_y)[kC]) {
  Vec o[kN], y[kN];
#pragma GCC unroll 8
  for (int n = 0; n < kN; ++n) {
    o[n] = load(s.dO + i * V + x + n * kLanes);
    y[n] = load(s.dY + i * V + x + n * kLanes);
  }
  for (int j = 0; j <= i; ++j) {
    Vec so = kFirst ? Vec{} : sum_o[j], sy = kFirst ? Vec{} : sum_y[j];
#pragma GCC unroll 8
    for (int n = 0; n < kN; ++n) {
      const Vec value = load(v_new + j * V + x + n * kLanes);
      so += o[n] * value;
      sy += y[n] * value;
    }
    sum_o[j] = so;
    sum_y[j] = sy;
  }
}

// dA, dP = Diag(beta) dL, and the part of dbeta that comes through L.
static inline void score_grads(const Work& s, const Chunk& c, const float* v_new, int64_t V) {
#ifdef __AVX512F__
  constexpr int kBlock = 8;
#else
  constexpr int kBlock = 4;
#endif
  Vec sum_o[kC] = {}, sum_y[kC] = {};
  for (int i = kC - 1; i >= 0; --i) {
    int64_t x = 0;
    if (V >= kBlock * kLanes) {
      score_grad_row<kBlock, true>(s, v_new, V, i, x, sum_o, sum_y);
      for (x += kBlock * kLanes; x + kBlock * kLanes <= V; x += kBlock * kLanes) {
        score_grad_row<kBlock, false>(s, v_new, V, i, x, sum_o, sum_y);
      }
    } else {
      score_grad_row<2, true>(s, v_new, V, i, x, sum_o, sum_y);
      x += 2 * kLanes;
    }
    for (; x < V; x += 2 * kLanes) score_grad_row<2, false>(s, v_new, V, i, x, sum_o, sum_y);
    sum_y[i] = Vec{};
    Vec beta_grad = {};
    for (int n = 0; n < kScoreVectors; ++n) {
      const int at = i * kC + n * kLanes;
      const Vec dL = -reduce_lanes(sum_y + n * kLanes);
      store(s.dA + at, reduce_lanes(sum_o + n * kLanes));
      store(s.dP + at, splat(c.beta[i]) * dL);
      beta_grad += dL * load(c.L + at);
    }
    s.dbeta[i] = reduce_add(beta_grad);
    sum_o[i] = Vec{};  // above the diagonal for the rows still to come
  }
}

// dS'^T becomes dS^T; decay_sum = rowsum(S dS').
static inline void state_grads(const Work& s, const Chunk& c, const float* state, const Widths& w) {
  for (int64_t x = 0; x < w.K; x += kPanel) {
    const Vec decay[2] = {load(c.decay + x), load(c.decay + x + kLanes)};
    Vec sum[2] = {};
    for (int64_t v = 0; v < w.V; v += kTileRows) {
      const int64_t at = x * w.V + v * kPanel;
      Vec acc[kTileRows][2];
      for (int m = 0; m < kTileRows; ++m) {
        for (int n = 0; n < 2; ++n) {
          const Vec old = load(s.dstate + at + m * kPanel + n * kLanes);
          sum[n] += old * load(state + at + m * kPanel + n * kLanes);
          acc[m][n] = decay[n] * old;
        }
      }
      madd_tile(acc, s.dO + v, 1, w.V, c.qd + x, w.K, kC);
      madd_tile(acc, s.minus_dR + v, 1, w.V, c.kd + x, w.K, kC);
      for (int m = 0; m < kTileRows; ++m) {
        for (int n = 0; n < 2; ++n) store(s.dstate + at + m * kPanel + n * kLanes, acc[m][n]);
      }
    }
    store(s.decay_sum + x, sum[0]);
    store(s.decay_sum + x + kLanes, sum[1]);
  }
}

// What does not pass between two tokens of the chunk: dqd becomes the gradient of the normalised q, dk_row
// and dk_col those of k as a row and as a column, dg that of g.
static inline void state_side_grads(const Work& s, const Chunk& c, int64_t K) {
  for (int64_t x = 0; x < K; x += kLanes) {
    Vec gamma = splat(1.0f), before = load(c.decay + x) * load(s.decay_sum + x);
    for (int i = 0; i < kC; ++i) {
      const int64_t at = i * K + x;
      gamma *= load(c.alpha + at);
      const Vec dq = load(s.dqd + at) * gamma, dk = load(s.dkd + at) * (splat(-c.beta[i]) * gamma);
      store(s.dqd + at, dq);
      store(s.dk_row + at, dk);
      store(s.dk_col + at, load(c.q + at) * dq + load(c.k + at) * dk);
      store(s.dg + at, before);
      before += load(c.kbar + at) * load(s.dkbar + at);
    }
    Vec rest = splat(1.0f), after = {};
    for (int i = kC - 1; i >= 0; --i) {
      const int64_t at = i * K + x;
      after += load(s.dk_col + at);
      store(s.dg + at, load(s.dg + at) + after);
      store(s.dk_col + at, rest * load(s.dkbar + at));
      rest *= load(c.alpha + at);
    }
  }
}

// The pairs of a chunk over kN vectors of channels, added to dqd, dk_row, dk_col and dg. Rows i and i + 1
// together: E_i+1,j is E_ij alpha_i+1, a factor that comes out of the sums over j.
template <int kN>
static inline void pair_grads(const Work& s, const Chunk& c, int64_t K, int64_t x) {
  for (int i = 0; i < kC; i += 2) {
    Vec q0[kN], k0[kN], q1[kN], k1[kN];  // row i, and row i + 1 times alpha_i+1
    Vec dq0[kN] = {}, dk0[kN] = {}, dq1[kN] = {}, dk1[kN] = {}, between0[kN] = {}, between1[kN] = {};
    Vec decay[kC][kN];  // E_ij
    const int64_t row0 = i * K + x, row1 = row0 + K;
#pragma GCC unroll 2
    for (int n = 0; n < kN; ++n) {
      const Vec alpha = load(c.alpha + row1 + n * kLanes);
      q0[n] = load(c.q + row0 + n * kLanes);
      k0[n] = load(c.k + row0 + n * kLanes);
      q1[n] = load(c.q + row1 + n * kLanes) * alpha;
      k1[n] = load(c.k + row1 + n * kLanes) * alpha;
      Vec e = splat(1.0f);
      for (int j = i; j >= 0; --j) {
        decay[j][n] = e;
        e *= load(c.alpha + j * K + x + n * kLanes);
      }
    }
    for (int j = 0; j <= i; ++j) {
      const Vec a0 = splat(s.dA[i * kC + j]), p0 = splat(s.dP[i * kC + j]);
      const Vec a1 = splat(s.dA[(i + 1) * kC + j]), p1 = splat(s.dP[(i + 1) * kC + j]);
#pragma GCC unroll 2
      for (int n = 0; n < kN; ++n) {
        const int64_t at = j * K + x + n * kLanes;
        const Vec e = decay[j][n], kj = load(c.k + at), decayed = e * kj;
        dq0[n] += a0 * decayed;
        dk0[n] += p0 * decayed;
        dq1[n] += a1 * decayed;
        dk1[n] += p1 * decayed;
        const Vec column0 = e * (a0 * q0[n] + p0 * k0[n]), column1 = e * (a1 * q1[n] + p1 * k1[n]);
        store(s.dk_col + at, load(s.dk_col + at) + (column0 + column1));
        store(s.dg + at, load(s.dg + at) + (between0[n] + between1[n]));
        between0[n] += column0 * kj;
        between1[n] += column1 * kj;
      }
    }
    const Vec a = splat(s.dA[(i + 1) * kC + i + 1]);  // row i + 1 with itself: E = 1, and dP = 0
#pragma GCC unroll 2
    for (int n = 0; n < kN; ++n) {
      const int64_t at0 = row0 + n * kLanes, at1 = row1 + n * kLanes;
      const Vec alpha = load(c.alpha + at1);
      store(s.dqd + at0, load(s.dqd + at0) + dq0[n]);
      store(s.dk_row + at0, load(s.dk_row + at0) + dk0[n]);
      store(s.dqd + at1, load(s.dqd + at1) + (alpha * dq1[n] + a * load(c.k + at1)));
      store(s.dk_row + at1, load(s.dk_row + at1) + alpha * dk1[n]);
      store(s.dk_col + at1, load(s.dk_col + at1) + a * load(c.q + at1));
      store(s.dg + at1, load(s.dg + at1) + between1[n]);
    }
  }
}

static inline void decay_grads(const Work& s, const Chunk& c, int64_t K) {
#ifdef __AVX512F__
  constexpr int kBlock = 2;
#else
  constexpr int kBlock = 1;
#endif
  state_side_grads(s, c, K);
  for (int64_t x = 0; x < K; x += kBlock * kLanes) pair_grads<kBlock>(s, c, K, x);
}

// Through the L2 norms, the gate and beta, into the outputs. bias_sum and A_log_sum [K] collect dz and
// dA_log.
static inline void token_grads(const KdaBackward& p, const Work& s, const Chunk& c, const ChunkGrads& g,
                               const Widths& w, int64_t t, int64_t rows, int64_t h, float* bias_sum,
                               float* A_log_sum) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(w.key));
  for (int64_t i = 0; i < rows; ++i) {
    const float *q = c.q + i * w.K, *k = c.k + i * w.K, *dq = s.dqd + i * w.K;
    const float *row = s.dk_row + i * w.K, *column = s.dk_col + i * w.K;
    const float *y = s.dY + i * w.V, *v = p.in.v + (t + i) * p.in.v_stride + h * w.value;
    Vec q_dot = {}, k_dot = {}, beta_dot = {};
    for (int64_t x = 0; x < w.K; x += kLanes) {
      q_dot += load(q + x) * load(dq + x);
      k_dot += load(k + x) * (load(row + x) + load(column + x));
      beta_dot -= load(c.kd + i * w.K + x) * load(s.dkd + i * w.K + x);
    }
    for (int64_t x = 0; x < w.value; x += kLanes) beta_dot += load(y + x) * load_part(v + x, w.value - x);
    const int64_t token = (t + i) * p.in.heads + h;
    // q holds q^ scale: dq^ = scale dq, and q^ <q^, dq^> = q <q, dq> / scale.
    const Vec q_factor = splat(g.q_norm[i] * scale), q_along = splat(g.q_norm[i] / scale * reduce_add(q_dot));
    const Vec k_factor = splat(g.k_norm[i]), k_along = splat(g.k_norm[i] * reduce_add(k_dot));
    for (int64_t x = 0; x < w.K; x += kLanes) {
      const int64_t out = token * w.key + x, left = w.key - x;
      const Vec dg = load(s.dg + i * w.K + x), dz = dg * load(g.slope_z + i * w.K + x);
      store(bias_sum + x, load(bias_sum + x) + dz);
      store(A_log_sum + x, load(A_log_sum + x) + dg * load(g.slope_A_log + i * w.K + x));
      if (left <= 0) continue;
      store_part(p.dq + out, q_factor * load(dq + x) - q_along * load(q + x), left);
      store_part(p.dk + out, k_factor * (load(row + x) + load(column + x)) - k_along * load(k + x), left);
      store_part(p.dz + out, dz, left);
    }
    for (int64_t x = 0; x < w.value; x += kLanes) {
      store_part(p.dv + token * w.value + x, -load(s.minus_dR + i * w.V + x), w.value - x);
    }
    const float beta_rest = sigmoid(-p.in.b[(t + i) * p.in.b_stride + h]);  // 1 - beta
    p.db[token] = (s.dbeta[i] + reduce_add(beta_dot)) * c.beta[i] * beta_rest;
  }
}

}  // namespace godwit::kernels::GODWIT_ISA
