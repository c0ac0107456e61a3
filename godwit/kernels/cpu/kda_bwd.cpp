// KDA backward. Notation of kda_tile.h, and for one chunk with dS' the gradient of the state it leaves:
//   dV~ = A^T dO + Kbar dS'      dY = X^T dV~       dR = Diag(beta) dY = dV
//   dA = tril(dO V~^T)           dL = -stril(dY V~^T)    (X (Diag(beta) R) = V~, so no R is needed)
//   d(Q Gamma) = dO S^T          d(K Gamma) = -dR S^T    dKbar = V~ dS'^T
//   dS = Diag(Gamma_15) dS' + (Q Gamma)^T dO - (K Gamma)^T dR
// and pair by pair, with a = dA_ij, p = beta_i dL_ij, E = E_ij:
//   dq_i += a k_j E   dk_i += p k_j E   dk_j += (a q_i + p k_i) E
// The gradient of g_t collects every product that contains alpha_t: the rows i >= t of q_i dq_i and k_i dk_i,
// less what lies between two tokens after t; from the state S it is Gamma_15 rowsum(S dS'), for all t of the
// chunk.
//
// The entering states are recomputed inside a segment from the saved one and the saved V~. States and their
// gradients are held transposed, in panels of kPanel key channels, [K / kPanel][V][kPanel]: every product
// with them is then a broadcast from the left times a vector from the right.
#include <algorithm>
#include <atomic>
#include <vector>

#include "godwit/base/parallel.h"
#include "godwit/kernels/cpu/dispatch/scratch.h"
#include "godwit/kernels/cpu/kda_tile.h"

namespace godwit::kernels::GODWIT_ISA {
namespace {

constexpr int kSegmentChunks = static_cast<int>(kKdaSegment / kKdaChunk);

// Arrays that one thread works with.
struct Work {
  float* chunk[kSegmentChunks];  // memory of a Chunk
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
    const int64_t chunk = Chunk::floats(w.K) + 2 * kC * w.K + 2 * kC + w.K * w.V + kC * w.V;
    return kSegmentChunks * chunk + w.K * w.V + kC * (w.K + w.V) + 4 * kC * w.V + 6 * kC * w.K + w.K +
           2 * kC * kC + kC;
  }
  Work(float* memory, const Widths& w) {
    const auto take = [&](int64_t n) {
      float* p = memory;
      memory += n;
      return p;
    };
    for (int i = 0; i < kSegmentChunks; ++i) {
      chunk[i] = take(Chunk::floats(w.K));
      grads[i] = {take(kC), take(kC), take(kC * w.K), take(kC * w.K)};
      state[i] = take(w.K * w.V);
      v_new[i] = take(kC * w.V);
    }
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
void load_transposed(float* panels, const float* from, const Widths& w) {
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
void store_transposed(float* to, const float* panels, const Widths& w) {
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
void load_values(float* to, const float* from, int64_t stride, int64_t rows, const Widths& w) {
  for (int64_t i = 0; i < kC; ++i) {
    for (int64_t v = 0; v < w.V; v += kLanes) {
      const int64_t left = from != nullptr && i < rows ? w.value - v : 0;
      store(to + i * w.V + v, left > 0 ? load_part(from + i * stride + v, left) : Vec{});
    }
  }
}

// to [16, 16]-blocked transpose of a [16, n] array: [n, 16]; and back.
void transpose_rows(float* to, const float* from, int64_t n) {
  for (int64_t x = 0; x < n; x += kLanes) {
    for (int i = 0; i < kC; i += kLanes) {
      Vec block[kLanes];
      for (int m = 0; m < kLanes; ++m) block[m] = load(from + (i + m) * n + x);
      transpose_lanes(block);
      for (int m = 0; m < kLanes; ++m) store(to + (x + m) * kC + i, block[m]);
    }
  }
}
void transpose_columns(float* to, const float* from, int64_t n) {
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
void advance_state(float* next, const float* state, const Chunk& c, const float* v_new, const Widths& w) {
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
void rows_times_panels(float* out, const float* left, const float* right, int64_t depth, int64_t width) {
  for (int64_t x = 0; x < width; x += kPanel) {
    for (int i = 0; i < kC; i += kTileRows) {
      Vec acc[kTileRows][2] = {};
      madd_tile(acc, left + i * depth, depth, 1, right + x * depth, kPanel, depth);
      for (int m = 0; m < kTileRows; ++m) {
        for (int n = 0; n < 2; ++n) store(out + (i + m) * width + x + n * kLanes, acc[m][n]);
      }
    }
  }
}

// dV~ = A^T dO + Kbar dS', then dY and -dR.
void value_grads(const Work& s, const Chunk& c, const Widths& w) {
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

// dA, dP = Diag(beta) dL, and the part of dbeta that comes through L.
void score_grads(const Work& s, const Chunk& c, const float* v_new, int64_t V) {
  for (int i = 0; i < kC; ++i) {
    Vec sum_o[kC] = {}, sum_y[kC] = {};
    for (int64_t v = 0; v < V; v += kPanel) {
      const Vec o[2] = {load(s.dO + i * V + v), load(s.dO + i * V + v + kLanes)};
      const Vec y[2] = {load(s.dY + i * V + v), load(s.dY + i * V + v + kLanes)};
      for (int j = 0; j <= i; ++j) {
        for (int n = 0; n < 2; ++n) {
          const Vec value = load(v_new + j * V + v + n * kLanes);
          sum_o[j] += o[n] * value;
          sum_y[j] += y[n] * value;
        }
      }
    }
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
  }
}

// dS'^T becomes dS^T; decay_sum = rowsum(S dS').
void state_grads(const Work& s, const Chunk& c, const float* state, const Widths& w) {
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
void state_side_grads(const Work& s, const Chunk& c, int64_t K) {
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

// The pairs of a chunk, kN vectors of channels at a time, added to dqd, dk_row, dk_col and dg.
template <int kN>
void pair_grads(const Work& s, const Chunk& c, int64_t K, int64_t x) {
  for (int i = 0; i < kC; ++i) {
    Vec ki[kN], qi[kN], dq[kN], dk[kN], e[kN], between[kN];
    Vec decay[kC][kN];  // E_ij
#pragma GCC unroll 4
    for (int n = 0; n < kN; ++n) {
      const int64_t at = i * K + x + n * kLanes;
      e[n] = splat(1.0f);
      ki[n] = load(c.k + at);
      qi[n] = load(c.q + at);
      dq[n] = load(s.dqd + at);
      dk[n] = load(s.dk_row + at);
      between[n] = Vec{};
    }
    for (int j = i; j >= 0; --j) {
#pragma GCC unroll 4
      for (int n = 0; n < kN; ++n) {
        decay[j][n] = e[n];
        e[n] *= load(c.alpha + j * K + x + n * kLanes);
      }
    }
    for (int j = 0; j <= i; ++j) {
      const Vec a = splat(s.dA[i * kC + j]), p = splat(s.dP[i * kC + j]);
#pragma GCC unroll 4
      for (int n = 0; n < kN; ++n) {
        const int64_t at = j * K + x + n * kLanes;
        const Vec kj = load(c.k + at), decayed = decay[j][n] * kj;
        dq[n] += a * decayed;
        dk[n] += p * decayed;
        const Vec column = decay[j][n] * (a * qi[n] + p * ki[n]);
        store(s.dk_col + at, load(s.dk_col + at) + column);
        store(s.dg + at, load(s.dg + at) + between[n]);
        between[n] += column * kj;
      }
    }
#pragma GCC unroll 4
    for (int n = 0; n < kN; ++n) {
      store(s.dqd + i * K + x + n * kLanes, dq[n]);
      store(s.dk_row + i * K + x + n * kLanes, dk[n]);
    }
  }
}

void decay_grads(const Work& s, const Chunk& c, int64_t K) {
#ifdef __AVX512F__
  constexpr int kBlock = 4;
#else
  constexpr int kBlock = 2;
#endif
  state_side_grads(s, c, K);
  int64_t x = 0;
  for (; x + kBlock * kLanes <= K; x += kBlock * kLanes) pair_grads<kBlock>(s, c, K, x);
  for (; x < K; x += 2 * kLanes) pair_grads<2>(s, c, K, x);
}

// Through the L2 norms, the gate and beta, into the outputs. bias_sum and A_log_sum [K] collect dz and
// dA_log.
void token_grads(const KdaBackward& p, const Work& s, const Chunk& c, const ChunkGrads& g, const Widths& w,
                 int64_t t, int64_t rows, int64_t h, float* bias_sum, float* A_log_sum) {
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

// Everything of sequence n, head h. sums [2, K]: the head's part of d dt_bias and, by channel, of dA_log.
void backward_head(const KdaBackward& p, const Widths& w, int64_t n, int64_t h, double* sums) {
  const int64_t begin = p.seq.cu_seqlens[n], end = p.seq.cu_seqlens[n + 1];
  const int64_t heads = p.in.heads, state_size = w.key * w.value, stride = heads * w.value;
  const int64_t head = (n * heads + h) * state_size;
  float* memory = thread_scratch(Work::floats(w) + 2 * w.K);
  const Work s(memory, w);
  float* chunk_sums = memory + Work::floats(w);
  std::fill(sums, sums + 2 * w.K, 0.0);
  load_transposed(s.dstate, p.grad_final_state != nullptr ? p.grad_final_state + head : nullptr, w);

  for (int64_t segment = kda_saved_segments(end - begin); segment >= 0 && begin < end; --segment) {
    const int64_t t0 = begin + segment * kKdaSegment, t1 = std::min(end, t0 + kKdaSegment);
    const float* entering = p.seq.initial_state != nullptr ? p.seq.initial_state + head : nullptr;
    if (segment > 0) {
      entering = p.states + ((p.seq.segment_offset[n] + segment - 1) * heads + h) * state_size;
    }
    load_transposed(s.state[0], entering, w);
    const int chunks = static_cast<int>((t1 - t0 + kC - 1) / kC);
    for (int i = 0; i < chunks; ++i) {
      const int64_t t = t0 + i * kC, rows = std::min<int64_t>(kC, t1 - t);
      const Chunk c(s.chunk[i], w.K);
      prepare_chunk</*kGrads=*/true>(p.in, w, c, s.grads[i], t, rows, h);
      load_values(s.v_new[i], p.v_new + t * stride + h * w.value, stride, rows, w);
      if (i + 1 < chunks) advance_state(s.state[i + 1], s.state[i], c, s.v_new[i], w);
    }
    for (int i = chunks - 1; i >= 0; --i) {
      const int64_t t = t0 + i * kC, rows = std::min<int64_t>(kC, t1 - t);
      const Chunk c(s.chunk[i], w.K);
      load_values(s.dO, p.grad_o != nullptr ? p.grad_o + t * stride + h * w.value : nullptr, stride, rows, w);
      value_grads(s, c, w);
      score_grads(s, c, s.v_new[i], w.V);
      rows_times_panels(s.dqd, s.dO, s.state[i], w.V, w.K);
      rows_times_panels(s.dkd, s.dY, s.state[i], w.V, w.K);
      rows_times_panels(s.dkbar, s.v_new[i], s.dstate, w.V, w.K);
      state_grads(s, c, s.state[i], w);
      decay_grads(s, c, w.K);
      std::fill(chunk_sums, chunk_sums + 2 * w.K, 0.0f);
      token_grads(p, s, c, s.grads[i], w, t, rows, h, chunk_sums, chunk_sums + w.K);
      for (int64_t x = 0; x < 2 * w.K; ++x) sums[x] += chunk_sums[x];
    }
  }
  if (p.d_initial_state != nullptr) store_transposed(p.d_initial_state + head, s.dstate, w);
}

}  // namespace

void kda_chunk_backward(const KdaBackward& p) {
  const Widths w(p.in);
  const int64_t heads = p.in.heads, tasks = p.seq.count * heads;
  std::vector<double> sums(static_cast<size_t>(tasks * 2 * w.K));
  std::atomic<int64_t> next{0};
  parallel_for(0, std::min<int64_t>(tasks, num_threads()), 1, [&](int64_t, int64_t) {
    const FlushDenormals flush;
    for (int64_t task = next++; task < tasks; task = next++) {
      backward_head(p, w, task / heads, task % heads, sums.data() + task * 2 * w.K);
    }
  });
  for (int64_t h = 0; h < heads; ++h) {  // sequence by sequence: the order does not depend on the threads
    double A_log = 0;
    for (int64_t x = 0; x < w.key; ++x) {
      double bias = 0;
      for (int64_t n = 0; n < p.seq.count; ++n) {
        const double* head = sums.data() + (n * heads + h) * 2 * w.K;
        bias += head[x];
        A_log += head[w.K + x];
      }
      p.ddt_bias[h * w.key + x] = static_cast<float>(bias);
    }
    p.dA_log[h] = static_cast<float>(A_log);
  }
}

}  // namespace godwit::kernels::GODWIT_ISA
