// KDA backward: the walk over sequences, heads and segments (kda_bwd_tile.h has the chunk). The states that
// enter the chunks of a segment are recomputed from the segment's saved one and the saved V~.
#include <algorithm>
#include <atomic>
#include <vector>

#include "godwit/base/parallel.h"
#include "godwit/kernels/cpu/dispatch/scratch.h"
#include "godwit/kernels/cpu/kda_bwd_tile.h"

namespace godwit::kernels::GODWIT_ISA {
namespace {

// The heads first .. first + count of sequence n on one thread: segment by segment from the last to the
// first, and in each head by head.
class Walk {
 public:
  // sums [N * heads, 2, K]: by sequence and head the parts of d dt_bias and, by channel, of dA_log.
  Walk(const KdaBackward& p, const Widths& w, int64_t n, int64_t first, int64_t count, double* sums)
      : p_(p),
        w_(w),
        n_(n),
        first_(first),
        count_(count),
        begin_(p.seq.cu_seqlens[n]),
        end_(p.seq.cu_seqlens[n + 1]),
        sums_(sums + (n * p.in.heads + first) * 2 * w.K),
        memory_(thread_scratch(floats())),
        s_(memory_, w),
        dstates_(memory_ + Work::floats(w)),
        chunk_sums_(dstates_ + count * w.K * w.V) {}

  void run() {
    std::fill(sums_, sums_ + count_ * 2 * w_.K, 0.0);
    for (int64_t i = 0; i < count_; ++i) load_transposed(dstate(i), head(p_.grad_final_state, n_, i), w_);
    for (int64_t segment = kda_saved_segments(end_ - begin_); begin_ < end_ && segment >= 0; --segment) {
      for (int64_t i = 0; i < count_; ++i) {
        s_.dstate = dstate(i);
        recompute(segment, i);
        backward(segment, i);
      }
    }
    if (p_.d_initial_state == nullptr) return;
    for (int64_t i = 0; i < count_; ++i) {
      store_transposed(p_.d_initial_state + (n_ * p_.in.heads + first_ + i) * w_.key * w_.value, dstate(i),
                       w_);
    }
  }

 private:
  int64_t floats() const { return Work::floats(w_) + count_ * w_.K * w_.V + 2 * w_.K; }
  float* dstate(int64_t i) const { return dstates_ + i * w_.K * w_.V; }

  // State `index` of the walk's i-th head in a [.., H, K, V] array, null in null.
  const float* head(const float* states, int64_t index, int64_t i) const {
    return states != nullptr ? states + (index * p_.in.heads + first_ + i) * w_.key * w_.value : nullptr;
  }
  const float* entering(int64_t segment, int64_t i) const {
    if (segment == 0) return head(p_.seq.initial_state, n_, i);
    return head(p_.states, p_.seq.segment_offset[n_] + segment - 1, i);
  }
  // Token t of the i-th head in a dense [T, H, V] array, null in null.
  const float* values(const float* from, int64_t t, int64_t i) const {
    return from != nullptr ? from + (t * p_.in.heads + first_ + i) * w_.value : nullptr;
  }
  int64_t segment_begin(int64_t segment) const { return begin_ + segment * kKdaSegment; }
  int64_t segment_end(int64_t segment) const { return std::min(end_, segment_begin(segment) + kKdaSegment); }

  // Chunks and entering states of a segment, and its V~.
  void recompute(int64_t segment, int64_t i) {
    load_transposed(s_.state[0], entering(segment, i), w_);
    const int64_t end = segment_end(segment);
    int64_t t = segment_begin(segment);
    for (int m = 0; t < end; ++m, t += kC) {
      const int64_t rows = std::min<int64_t>(kC, end - t);
      const Chunk c(s_.chunk[m], s_.derived, w_.K);
      prepare_chunk</*kGrads=*/true>(p_.in, w_, c, s_.grads[m], t, rows, first_ + i);
      load_values(s_.v_new[m], values(p_.v_new, t, i), p_.in.heads * w_.value, rows, w_);
      if (t + kC < end) advance_state(s_.state[m + 1], s_.state[m], c, s_.v_new[m], w_);
    }
  }

  void backward(int64_t segment, int64_t i) {
    const int64_t begin = segment_begin(segment), end = segment_end(segment);
    const int chunks = static_cast<int>((end - begin + kC - 1) / kC);
    for (int m = chunks - 1; m >= 0; --m) {
      const int64_t t = begin + m * kC, rows = std::min<int64_t>(kC, end - t);
      const Chunk c(s_.chunk[m], s_.derived, w_.K);
      if (m + 1 < chunks) apply_decays(c, w_.K);  // the last chunk's are still there
      SoonList soon = next_inputs(segment, i, chunks - 1 - m);
      load_values(s_.dO, values(p_.grad_o, t, i), p_.in.heads * w_.value, rows, w_);
      value_grads(s_, c, w_);
      score_grads(s_, c, s_.v_new[m], w_.V);
      rows_times_panels(s_.dqd, s_.dO, s_.state[m], w_.V, w_.K, soon);
      rows_times_panels(s_.dkd, s_.dY, s_.state[m], w_.V, w_.K, soon);
      rows_times_panels(s_.dkbar, s_.v_new[m], s_.dstate, w_.V, w_.K, soon);
      state_grads(s_, c, s_.state[m], w_);
      decay_grads(s_, c, w_.K);
      std::fill(chunk_sums_, chunk_sums_ + 2 * w_.K, 0.0f);
      token_grads(p_, s_, c, s_.grads[m], w_, t, rows, first_ + i, chunk_sums_, chunk_sums_ + w_.K);
      for (int64_t x = 0; x < 2 * w_.K; ++x) sums_[i * 2 * w_.K + x] += chunk_sums_[x];
    }
  }

  // The part-th quarter of what the step after (segment, i) will read.
  SoonList next_inputs(int64_t segment, int64_t i, int64_t part) const {
    SoonList soon(3 * (w_.K / kPanel) * (kC / kTileRows));
    if (++i == count_) {
      i = 0;
      if (--segment < 0) return soon;
    }
    const KdaInputs& in = p_.in;
    const int64_t t = segment_begin(segment) + part * kC, h = first_ + i;
    const int64_t rows = std::clamp<int64_t>(segment_end(segment) - t, 0, kC), stride = in.heads * w_.value;
    soon.add(in.q + t * in.q_stride + h * w_.key, in.q_stride, rows, w_.key);
    soon.add(in.k + t * in.k_stride + h * w_.key, in.k_stride, rows, w_.key);
    soon.add(in.z + t * in.z_stride + h * w_.key, in.z_stride, rows, w_.key);
    soon.add(values(p_.v_new, t, i), stride, rows, w_.value);
    soon.add(in.v + t * in.v_stride + h * w_.value, in.v_stride, rows, w_.value);
    soon.add(values(p_.grad_o, t, i), stride, rows, w_.value);
    const int64_t quarter = w_.key / kSegmentChunks;
    const float* state = entering(segment, i);
    soon.add(state != nullptr ? state + part * quarter * w_.value : nullptr, w_.value, quarter, w_.value);
    return soon;
  }

  const KdaBackward& p_;
  const Widths& w_;
  const int64_t n_, first_, count_, begin_, end_;
  double* sums_;
  float* memory_;
  Work s_;
  float *dstates_, *chunk_sums_;
};

}  // namespace

void kda_chunk_backward(const KdaBackward& p) {
  const Widths w(p.in);
  const int64_t heads = p.in.heads, together = heads_together(heads, p.seq.count * heads, num_threads());
  const int64_t tasks = p.seq.count * heads / together;
  std::vector<double> sums(static_cast<size_t>(p.seq.count * heads * 2 * w.K));
  std::atomic<int64_t> next{0};
  parallel_for(0, std::min<int64_t>(tasks, num_threads()), 1, [&](int64_t, int64_t) {
    const FlushDenormals flush;
    for (int64_t task = next++; task < tasks; task = next++) {
      const int64_t first = task * together;
      Walk(p, w, first / heads, first % heads, together, sums.data()).run();
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
