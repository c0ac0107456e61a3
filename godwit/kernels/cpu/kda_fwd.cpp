// KDA forward. The state of a head lies in panels of kPanel columns, [V / kPanel][K][kPanel]: a panel (16 KiB
// for K = 128) stays in L1 while one chunk passes over it, and different panels never meet.
#include <algorithm>
#include <atomic>

#include "godwit/base/parallel.h"
#include "godwit/kernels/cpu/dispatch/scratch.h"
#include "godwit/kernels/cpu/kda_tile.h"

namespace godwit::kernels::GODWIT_ISA {
namespace {

// One chunk on one panel. S [K, kPanel] becomes S'; v [16, kPanel] becomes V~; o [16, kPanel] is written; r
// is working memory of the same shape.
void chunk_panel(const Chunk& c, int64_t K, float* S, float* v, float* r, float* o) {
  for (int i = 0; i < kC; i += kTileRows) {  // R = V - (K Gamma) S
    Vec acc[kTileRows][2] = {};
    madd_tile(acc, c.kd + i * K, K, 1, S, kPanel, K);
    for (int m = 0; m < kTileRows; ++m) {
      for (int n = 0; n < 2; ++n) {
        const int64_t at = (i + m) * kPanel + n * kLanes;
        store(r + at, load(v + at) - acc[m][n]);
      }
    }
  }
  for (int i = 0; i < kC; i += kTileRows) {  // V~ = X Diag(beta) R
    Vec acc[kTileRows][2] = {};
    madd_tile(acc, c.XB + i * kC, kC, 1, r, kPanel, i + kTileRows);
    for (int m = 0; m < kTileRows; ++m) {
      for (int n = 0; n < 2; ++n) store(v + (i + m) * kPanel + n * kLanes, acc[m][n]);
    }
  }
  for (int i = 0; i < kC; i += kTileRows) {  // O = (Q Gamma) S + A V~
    Vec acc[kTileRows][2] = {};
    madd_tile(acc, c.qd + i * K, K, 1, S, kPanel, K);
    madd_tile(acc, c.A + i * kC, kC, 1, v, kPanel, i + kTileRows);
    for (int m = 0; m < kTileRows; ++m) {
      for (int n = 0; n < 2; ++n) store(o + (i + m) * kPanel + n * kLanes, acc[m][n]);
    }
  }
  for (int64_t x = 0; x < K; x += kTileRows) {  // S' = Diag(Gamma_15) S + Kbar^T V~
    Vec acc[kTileRows][2];
    for (int m = 0; m < kTileRows; ++m) {
      const Vec decay = splat(c.decay[x + m]);
      for (int n = 0; n < 2; ++n) acc[m][n] = decay * load(S + (x + m) * kPanel + n * kLanes);
    }
    madd_tile(acc, c.kbar + x, 1, K, v, kPanel, kC);
    for (int m = 0; m < kTileRows; ++m) {
      for (int n = 0; n < 2; ++n) store(S + (x + m) * kPanel + n * kLanes, acc[m][n]);
    }
  }
}

// A head's state [K, V], dense <-> panels.
void load_state(float* panels, const float* from, const Widths& w) {
  for (int64_t v = 0; v < w.V; v += kPanel) {
    float* panel = panels + v * w.K;
    for (int64_t x = 0; x < w.K; ++x) {
      for (int n = 0; n < 2; ++n) {
        const int64_t left = from != nullptr && x < w.key ? w.value - v - n * kLanes : 0;
        store(panel + x * kPanel + n * kLanes, load_part(from + x * w.value + v + n * kLanes, left));
      }
    }
  }
}
void store_state(float* to, const float* panels, const Widths& w) {
  for (int64_t v = 0; v < w.V; v += kPanel) {
    for (int64_t x = 0; x < w.key; ++x) {
      for (int n = 0; n < 2; ++n) {
        store_part(to + x * w.value + v + n * kLanes, load(panels + v * w.K + x * kPanel + n * kLanes),
                   w.value - v - n * kLanes);
      }
    }
  }
}

// All chunks of sequence n, head h, one after another.
void forward_head(const KdaForward& p, const Widths& w, int64_t n, int64_t h) {
  const int64_t begin = p.seq.cu_seqlens[n], end = p.seq.cu_seqlens[n + 1];
  const int64_t heads = p.in.heads, state_size = w.key * w.value, o_stride = heads * w.value;
  float* memory = thread_scratch(Chunk::floats(w.K) + w.K * w.V + 3 * kC * kPanel);
  const Chunk c(memory, w.K);
  float* S = memory + Chunk::floats(w.K);
  float *v = S + w.K * w.V, *r = v + kC * kPanel, *o = r + kC * kPanel;

  const float* initial = p.seq.initial_state;
  load_state(S, initial != nullptr ? initial + (n * heads + h) * state_size : nullptr, w);
  for (int64_t t = begin; t < end; t += kC) {
    const int64_t rows = std::min<int64_t>(kC, end - t);
    if (p.states != nullptr && t > begin && (t - begin) % kKdaSegment == 0) {
      const int64_t segment = p.seq.segment_offset[n] + (t - begin) / kKdaSegment - 1;
      store_state(p.states + (segment * heads + h) * state_size, S, w);
    }
    prepare_chunk</*kGrads=*/false>(p.in, w, c, ChunkGrads{}, t, rows, h);
    for (int64_t x = 0; x < w.V; x += kPanel) {
      const int64_t width = std::min<int64_t>(kPanel, w.value - x);
      load_panel(v, p.in.v + t * p.in.v_stride + h * w.value + x, p.in.v_stride, rows, width);
      chunk_panel(c, w.K, S + x * w.K, v, r, o);
      const int64_t at = t * o_stride + h * w.value + x;
      store_panel(p.o + at, o_stride, o, rows, width);
      if (p.v_new != nullptr) store_panel(p.v_new + at, o_stride, v, rows, width);
    }
  }
  store_state(p.final_state + (n * heads + h) * state_size, S, w);
}

}  // namespace

void kda_chunk_forward(const KdaForward& p) {
  const Widths w(p.in);
  std::atomic<int64_t> next{0};
  const int64_t tasks = p.seq.count * p.in.heads;
  parallel_for(0, std::min<int64_t>(tasks, num_threads()), 1, [&](int64_t, int64_t) {
    const FlushDenormals flush;
    for (int64_t task = next++; task < tasks; task = next++)
      forward_head(p, w, task / p.in.heads, task % p.in.heads);
  });
}

}  // namespace godwit::kernels::GODWIT_ISA
