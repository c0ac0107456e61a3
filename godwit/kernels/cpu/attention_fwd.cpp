// Forward of causal attention (kernels/attention.h): a block of queries against one block of keys after the
// other. Keys and values of a block are packed into panels of two vectors; a panel stays in L1 while all
// queries pass.
#include <cmath>
#include <cstring>

#include "godwit/kernels/cpu/attention_tile.h"

namespace godwit::kernels::GODWIT_ISA {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Buffers {
  float *q, *o, *s;                 // rows of attention_row(key), (value), (kAttentionKeys) floats
  float *largest, *total, *factor;  // [rows] running maximum, sum of exp, and what the last block scales by
  float *key_panels, *value_panels;
  Buffers(const AttentionInputs& in, float* scratch) {
    const auto take = [&](int64_t floats) {
      float* at = scratch;
      scratch += floats;
      return at;
    };
    q = take(kAttentionQueries * attention_row(in.key));
    o = take(kAttentionQueries * attention_row(in.value));
    s = take(kAttentionQueries * attention_row(kAttentionKeys));
    key_panels = take(kAttentionKeys * attention_columns(in.key));
    value_panels = take(kAttentionKeys * attention_columns(in.value));
    largest = take(kAttentionQueries);
    total = take(kAttentionQueries);
    factor = take(kAttentionQueries);
  }
};

// The row's scores [first, last] to weights exp(score - largest so far); lanes beside them hold zeros.
void softmax_row(float* s, int64_t first, int64_t last, float& largest, float& total, float& factor) {
  const int64_t begin = first / kLanes * kLanes;
  VecI lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  Vec top = splat(kNone);
  for (int64_t v = begin; v <= last; v += kLanes) {
    Vec x = load(s + v);
    if (v < first || v + kLanes - 1 > last) {
      const VecI at = lane + static_cast<int32_t>(v);
      x = (at >= static_cast<int32_t>(first)) & (at <= static_cast<int32_t>(last)) ? x : splat(kNone);
      store(s + v, x);
    }
    top = vmax(top, x);
  }
  const float now = std::max(largest, reduce_max(top));
  const Vec base = splat(now == kNone ? 0.0f : now);  // nothing seen yet: all weights are exp(-inf)
  Vec sum = {};
  for (int64_t v = begin; v <= last; v += kLanes) {
    const Vec weight = vexp(load(s + v) - base);
    store(s + v, weight);
    sum += weight;
  }
  float factors[kLanes];
  store(factors, vexp(splat(largest) - base));
  factor = factors[0];
  total = total * factor + reduce_add(sum);
  largest = now;
}

void key_block(const AttentionInputs& in, const Buffers& b, const Band& band, int64_t rows, const float* k,
               const float* v) {
  const int64_t ldq = attention_row(in.key), ldo = attention_row(in.value),
                lds = attention_row(kAttentionKeys);
  pack_columns(b.key_panels, k, in.k.row, band.depth, in.key);
  for (int64_t j = 0; j < band.depth; j += kPanel) {
    const int64_t begin = band.begin(rows, j), end = band.end(rows, std::min(j + kPanel, band.depth) - 1);
    if (begin >= end) continue;
    gemm_panel<false>(end - begin, in.key, b.q + begin * ldq, ldq, b.key_panels + j * in.key, ZeroInit(),
                      [&](int64_t r, Vec s0, Vec s1) {
                        float* s = b.s + (begin + r) * lds + j;
                        store(s, s0);
                        store(s + kLanes, s1);
                      });
  }
  for (int64_t r = 0; r < rows; ++r) {
    softmax_row(b.s + r * lds, band.first(r), band.last(r), b.largest[r], b.total[r], b.factor[r]);
  }
  pack_rows(b.value_panels, band.depth, v, in.v.row, band.depth, in.value);
  for (int64_t c = 0; c < in.value; c += kPanel) {
    float* o = b.o + c;
    band_panel<false>(
        0, rows, band, b.s, lds, b.value_panels + c * band.depth,
        [&](int64_t r, Vec& o0, Vec& o1) {
          const Vec factor = splat(b.factor[r]);
          o0 = load(o + r * ldo) * factor;
          o1 = load(o + r * ldo + kLanes) * factor;
        },
        [&](int64_t r, Vec o0, Vec o1) {
          store(o + r * ldo, o0);
          store(o + r * ldo + kLanes, o1);
        });
  }
}

}  // namespace

void attention_forward_part(const AttentionForward& p, const AttentionQueries& part, float* scratch) {
  const AttentionInputs& in = p.in;
  const int64_t n = part.sequence, h = part.head, rows = part.end - part.begin;
  const int64_t token = in.cu_q[n] + part.begin;
  const int64_t past = (in.cu_k[n + 1] - in.cu_k[n]) - (in.cu_q[n + 1] - in.cu_q[n]);
  const int64_t position = past + part.begin, keys = past + part.end;  // of the first query; seen by the last
  const int64_t ldq = attention_row(in.key), ldo = attention_row(in.value);
  const Buffers b(in, scratch);
  for (int64_t r = 0; r < rows; ++r) {
    const float* q = in.q.at(token + r, h);
    for (int64_t d = 0; d < in.key; d += kLanes) store(b.q + r * ldq + d, load(q + d) * splat(in.scale));
    std::memset(b.o + r * ldo, 0, ldo * sizeof(float));
    b.largest[r] = kNone;
    b.total[r] = 0;
  }
  const int64_t first = in.window > 0 ? std::max<int64_t>(0, position - in.window + 1) : 0;
  for (int64_t key = first / kAttentionKeys * kAttentionKeys; key < keys; key += kAttentionKeys) {
    const Band band = keys_of_queries(position, key, std::min(kAttentionKeys, keys - key), in.window);
    key_block(in, b, band, rows, in.k.at(in.cu_k[n] + key, h), in.v.at(in.cu_k[n] + key, h));
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = (token + r) * in.heads + h;
    const Vec total = splat(b.total[r]);
    for (int64_t c = 0; c < in.value; c += kLanes)
      store(p.o + row * in.value + c, load(b.o + r * ldo + c) / total);
    if (p.lse != nullptr) p.lse[row] = b.largest[r] + std::log(b.total[r]);
  }
}

}  // namespace godwit::kernels::GODWIT_ISA
