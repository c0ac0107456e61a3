// KDA for one token: the state is read twice and written once, kStepColumns columns at a time so that the
// second reading comes from L1. With S' = Diag(alpha) S:
//   r = v - k^T S'   S <- S' + beta k r^T   o = q^T S' + beta (q . k) r^T
#include <algorithm>

#include "godwit/base/parallel.h"
#include "godwit/kernels/cpu/dispatch/scratch.h"
#include "godwit/kernels/cpu/kda_tile.h"

namespace godwit::kernels::GODWIT_ISA {
namespace {

constexpr int64_t kStepColumns = 64;
constexpr int kStepVectors = kStepColumns / kLanes;

// One block of columns. kd, qd = k alpha, q alpha; qk = q . k. width <= kStepColumns. S null: zeros, not
// kept.
void step_block(const Chunk& c, int64_t key, float qk, float* S, int64_t stride, const float* v, float* o,
                int64_t width) {
  Vec ks[kStepVectors] = {}, qs[kStepVectors] = {};
  const bool whole = width == kStepColumns;
  const auto get = [&](const float* p, int n) {
    return whole ? load(p + n * kLanes) : load_part(p + n * kLanes, width - n * kLanes);
  };
  const auto put = [&](float* p, int n, Vec x) {
    whole ? store(p + n * kLanes, x) : store_part(p + n * kLanes, x, width - n * kLanes);
  };
  const int64_t rows = S == nullptr ? 0 : key;
  for (int64_t x = 0; x < rows; ++x) {
    const Vec kd = splat(c.kd[x]), qd = splat(c.qd[x]);
#pragma GCC unroll 8
    for (int n = 0; n < kStepVectors; ++n) {
      const Vec s = get(S + x * stride, n);
      ks[n] += kd * s;
      qs[n] += qd * s;
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < kStepVectors; ++n) {
    ks[n] = splat(c.beta[0]) * (get(v, n) - ks[n]);
    put(o, n, qs[n] + splat(qk) * ks[n]);
  }
  for (int64_t x = 0; x < rows; ++x) {
    const Vec alpha = splat(c.alpha[x]), k = splat(c.k[x]);
#pragma GCC unroll 8
    for (int n = 0; n < kStepVectors; ++n) put(S + x * stride, n, alpha * get(S + x * stride, n) + k * ks[n]);
  }
}

}  // namespace

void kda_step(const KdaStep& p) {
  const Widths w(p.in);
  const int64_t heads = p.in.heads, blocks = (w.value + kStepColumns - 1) / kStepColumns;
  const int64_t grain = std::max<int64_t>(1, 65536 / (w.key * w.value));
  parallel_for(0, p.count * heads, grain, [&](int64_t from, int64_t to) {
    const FlushDenormals flush;
    const Chunk c(thread_scratch(Chunk::floats(w.K)), w.K);
    for (int64_t task = from; task < to; ++task) {
      const int64_t n = task / heads, h = task % heads;
      load_tokens</*kGrads=*/false>(p.in, w, c, ChunkGrads{}, n, 1, h);
      Vec dot = {};
      for (int64_t x = 0; x < w.K; x += kLanes) {
        const Vec alpha = load(c.alpha + x), k = load(c.k + x), q = load(c.q + x);
        store(c.kd + x, k * alpha);
        store(c.qd + x, q * alpha);
        dot += k * q;
      }
      const float qk = reduce_add(dot);
      const int64_t slot = p.slots == nullptr ? n : p.slots[n];
      float* S = slot < 0 ? nullptr : p.state + slot * p.state_stride + h * w.key * w.value;
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t v = b * kStepColumns;
        step_block(c, w.key, qk, S == nullptr ? nullptr : S + v, w.value,
                   p.in.v + n * p.in.v_stride + h * w.value + v, p.o + task * w.value + v,
                   std::min(kStepColumns, w.value - v));
      }
    }
  });
}

}  // namespace godwit::kernels::GODWIT_ISA
