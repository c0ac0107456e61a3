// Backward of causal attention (kernels/attention.h): for a block of keys, all blocks of queries that see it,
// in order. Scores are computed again from the saved log-sum-exp. Five products a pair of blocks, each on
// packed panels; the gradients of the keys stay in scratch memory meanwhile.
#include <cstring>

#include "godwit/kernels/cpu/attention_tile.h"

namespace godwit::kernels::GODWIT_ISA {
namespace {

struct Buffers {
  int64_t ldq, ldo, lds;
  float *k_columns, *k_rows, *v_columns;  // panels of K^T, of scale K and of V^T
  float *dk, *dv;                         // [keys][attention_columns(width)]
  float *q, *go, *q_panels, *go_panels;   // scale Q and dO, as rows and as panels of columns
  float *p, *ds;                          // S, then P; dP, then dS
  Buffers(const AttentionInputs& in, float* scratch)
      : ldq(attention_row(in.key)), ldo(attention_row(in.value)), lds(attention_row(kAttentionKeys)) {
    const auto take = [&](int64_t floats) {
      float* at = scratch;
      scratch += floats;
      return at;
    };
    const int64_t key = attention_columns(in.key), value = attention_columns(in.value);
    k_columns = take(kAttentionKeys * key);
    k_rows = take(kAttentionKeys * key);
    v_columns = take(kAttentionKeys * value);
    dk = take(kAttentionKeys * key);
    dv = take(kAttentionKeys * value);
    q = take(kAttentionBackwardQueries * ldq);
    go = take(kAttentionBackwardQueries * ldo);
    q_panels = take(kAttentionBackwardQueries * key);
    go_panels = take(kAttentionBackwardQueries * value);
    p = take(kAttentionBackwardQueries * lds);
    ds = take(kAttentionBackwardQueries * lds);
  }
};

// `rows` rows of `width` floats to rows `ld` apart and to panels of columns, times `factor`.
void copy_rows(float* to, int64_t ld, float* panels, int64_t rows, int64_t width, const float* x,
               int64_t stride, float factor) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t d = 0; d < width; d += kLanes)
      store(to + r * ld + d, load(x + r * stride + d) * splat(factor));
  }
  pack_rows(panels, rows, to, ld, rows, width);
}

// Rows of the block times the panels of all keys they see: s[r][j] = a_r . b_j.
void scores(const Band& band, int64_t rows, int64_t width, const float* a, int64_t lda, const float* panels,
            float* s, int64_t lds) {
  for (int64_t j = 0; j < band.depth; j += kPanel) {
    const int64_t begin = band.begin(rows, j), end = band.end(rows, std::min(j + kPanel, band.depth) - 1);
    if (begin >= end) continue;
    gemm_panel<false>(end - begin, width, a + begin * lda, lda, panels + j * width, ZeroInit(),
                      [&](int64_t r, Vec s0, Vec s1) {
                        float* to = s + (begin + r) * lds + j;
                        store(to, s0);
                        store(to + kLanes, s1);
                      });
  }
}

// C [rows, width] += A B over the rows' bands; C's rows may end where the width does.
template <bool kTransposed>
void accumulate(const Band& band, int64_t rows, int64_t width, const float* a, int64_t lda,
                const float* panels, float* c, int64_t ldc) {
  for (int64_t col = 0; col < width; col += kPanel) {
    const bool both = col + kLanes < width;
    band_panel<kTransposed>(
        0, rows, band, a, lda, panels + col * band.depth,
        [&](int64_t r, Vec& c0, Vec& c1) {
          c0 = load(c + r * ldc + col);
          c1 = both ? load(c + r * ldc + col + kLanes) : Vec{};
        },
        [&](int64_t r, Vec c0, Vec c1) {
          store(c + r * ldc + col, c0);
          if (both) store(c + r * ldc + col + kLanes, c1);
        });
  }
}

// Scores to P = exp(S - lse), and dP to dS = P (dP - delta), over the row's band. (Lanes beside the band hold
// anything; nothing reads them.)
void weights_row(float* p, float* ds, int64_t first, int64_t last, float lse, float delta) {
  for (int64_t v = first / kLanes * kLanes; v <= last; v += kLanes) {
    const Vec weight = vexp(load(p + v) - splat(lse));
    store(p + v, weight);
    store(ds + v, weight * (load(ds + v) - splat(delta)));
  }
}

// The part's keys `key` .. key + depth - 1 against queries [query, query + rows).
void query_block(const AttentionBackward& args, const AttentionKeyRange& part, const Buffers& b, int64_t key,
                 int64_t depth, int64_t query, int64_t rows, const float* delta) {
  const AttentionInputs& in = args.in;
  const int64_t n = part.sequence, h = part.head, token = in.cu_q[n] + query;
  const int64_t position = query + (in.cu_k[n + 1] - in.cu_k[n]) - (in.cu_q[n + 1] - in.cu_q[n]);
  const Band by_query = keys_of_queries(position, key, depth, in.window);
  const Band by_key = queries_of_keys(position, key, rows, in.window);
  copy_rows(b.q, b.ldq, b.q_panels, rows, in.key, in.q.at(token, h), in.q.row, in.scale);
  copy_rows(b.go, b.ldo, b.go_panels, rows, in.value, args.grad_o + (token * in.heads + h) * in.value,
            in.heads * in.value, 1.0f);
  scores(by_query, rows, in.key, b.q, b.ldq, b.k_columns, b.p, b.lds);
  scores(by_query, rows, in.value, b.go, b.ldo, b.v_columns, b.ds, b.lds);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = (token + r) * in.heads + h;
    weights_row(b.p + r * b.lds, b.ds + r * b.lds, by_query.first(r), by_query.last(r), args.lse[row],
                delta[row]);
  }
  accumulate<true>(by_key, depth, in.value, b.p, b.lds, b.go_panels, b.dv, attention_columns(in.value));
  accumulate<true>(by_key, depth, in.key, b.ds, b.lds, b.q_panels, b.dk, attention_columns(in.key));
  accumulate<false>(by_query, rows, in.key, b.ds, b.lds, b.k_rows,
                    part.dq + (query - part.first_query) * part.dq_row, part.dq_row);
}

void write_rows(float* to, int64_t stride, const float* from, int64_t ld, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; ++r) std::memcpy(to + r * stride, from + r * ld, width * sizeof(float));
}

}  // namespace

void attention_backward_part(const AttentionBackward& p, const AttentionKeyRange& part, const float* delta,
                             float* scratch) {
  const AttentionInputs& in = p.in;
  const int64_t n = part.sequence, h = part.head;
  const int64_t queries = in.cu_q[n + 1] - in.cu_q[n], past = in.cu_k[n + 1] - in.cu_k[n] - queries;
  const Buffers b(in, scratch);
  for (int64_t i = 0; i < part.end_query - part.first_query; ++i) {
    std::memset(part.dq + i * part.dq_row, 0, in.key * sizeof(float));
  }
  const int64_t ldk = attention_columns(in.key), ldv = attention_columns(in.value);
  for (int64_t key = part.begin; key < part.end; key += kAttentionKeys) {
    const int64_t depth = std::min(kAttentionKeys, part.end - key), token = in.cu_k[n] + key;
    const float* k = in.k.at(token, h);
    pack_columns(b.k_columns, k, in.k.row, depth, in.key);
    pack_columns(b.v_columns, in.v.at(token, h), in.v.row, depth, in.value);
    for (int64_t r = 0; r < depth; ++r) {  // dk is free until below
      for (int64_t d = 0; d < in.key; d += kLanes)
        store(b.dk + r * ldk + d, load(k + r * in.k.row + d) * splat(in.scale));
    }
    pack_rows(b.k_rows, depth, b.dk, ldk, depth, in.key);
    std::memset(b.dk, 0, depth * ldk * sizeof(float));
    std::memset(b.dv, 0, depth * ldv * sizeof(float));
    const int64_t first = std::max<int64_t>(0, key - past);
    const int64_t end = in.window > 0 ? std::min(queries, key + depth - 1 + in.window - past) : queries;
    for (int64_t query = first; query < end; query += kAttentionBackwardQueries) {
      query_block(p, part, b, key, depth, query, std::min(kAttentionBackwardQueries, end - query), delta);
    }
    write_rows(p.dk + (token * in.heads + h) * in.key, in.heads * in.key, b.dk, ldk, depth, in.key);
    write_rows(p.dv + (token * in.heads + h) * in.value, in.heads * in.value, b.dv, ldv, depth, in.value);
  }
}

void attention_delta(const AttentionBackward& p, int64_t begin, int64_t end, float* delta) {
  const int64_t width = p.in.value;
  for (int64_t i = begin; i < end; ++i) {
    Vec sum = {};
    for (int64_t c = 0; c < width; c += kLanes)
      sum = fma(load(p.o + i * width + c), load(p.grad_o + i * width + c), sum);
    delta[i] = reduce_add(sum);
  }
}

}  // namespace godwit::kernels::GODWIT_ISA
