// See kernels/mla_decode.h. Scores: tiles of heads x rows, products along the width in the lanes, so that a
// row need not be transposed. Values: tiles of heads x vectors of columns, a chain over the block's rows in
// order.
#include <algorithm>
#include <limits>

#include "godwit/kernels/cpu/lanes.h"
#include "godwit/kernels/cpu/mla_decode_isa.h"
#include "godwit/kernels/cpu/tile.h"

namespace godwit::kernels::GODWIT_ISA {
namespace {

constexpr int64_t kTileHeads = 4;
constexpr int64_t kRowTile =
    kLanes / 4;  // 4 heads x kRowTile rows give the kLanes sums that reduce_lanes takes
constexpr float kNone = -std::numeric_limits<float>::infinity();

static inline Vec load_row(const float* p, AllLanes) {
  return load(p);
}
static inline Vec load_row(const float* p, int64_t lanes) {
  return load_part(p, lanes);
}
static inline Vec load_row(const uint16_t* p, AllLanes) {
  return load_as_float(p);
}
static inline Vec load_row(const uint16_t* p, int64_t lanes) {
  uint16_t copy[kLanes] = {};
  for (int64_t i = 0; i < lanes; ++i) copy[i] = p[i];
  return load_as_float(copy);
}

template <class W>
struct Block {
  const W* row[kMlaBlock];
  int64_t rows;  // the pointers behind them repeat the last row: read, but weighted by zero
};

template <class W>
Block<W> block_rows(const MlaDecode& p, int64_t sequence, int64_t begin, int64_t end) {
  Block<W> block;
  block.rows = end - begin;
  const auto* pages = static_cast<const W*>(p.pages);
  const int32_t* table = p.table + sequence * p.table_stride;
  for (int64_t i = 0; i < kMlaBlock; ++i) {
    const int64_t r = std::min(begin + i, end - 1);
    block.row[i] = pages + table[r / p.page_rows] * p.page_stride + r % p.page_rows * p.row_stride;
  }
  return block;
}

// score[h][i] = q_h . row_i for heads [0, kHeads) and all rows of the block.
template <int kHeads, class W>
void score_tile(const MlaDecode& p, const float* q, const Block<W>& block, float (*score)[kMlaBlock]) {
  for (int64_t i = 0; i < block.rows; i += kRowTile) {
    Vec sum[kLanes] = {};
    for_vectors(p.width, [&](int64_t d, auto lanes) {
      Vec row[kRowTile];
#pragma GCC unroll 4
      for (int j = 0; j < kRowTile; ++j) row[j] = load_row(block.row[i + j] + d, lanes);
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) {
        const Vec left = load_lanes(q + h * p.width + d, lanes);
#pragma GCC unroll 4
        for (int j = 0; j < kRowTile; ++j) sum[h * kRowTile + j] = fma(left, row[j], sum[h * kRowTile + j]);
      }
    });
    float sums[kLanes];
    store(sums, reduce_lanes(sum));
    for (int h = 0; h < kHeads; ++h) {
      for (int j = 0; j < kRowTile; ++j) score[h][i + j] = sums[h * kRowTile + j] * p.scale;
    }
  }
}

// Not inlined, so that every tile height runs the same instructions.
// score[i] -> weights exp(score - largest so far), zero behind the block's rows; returns the factor for what
// was summed before.
[[gnu::noinline]] float softmax_block(int64_t rows, float* score, float* statistics) {
  float& largest = statistics[0];
  float& total = statistics[1];
  Vec top = splat(kNone);
  for (int64_t i = rows; i < kMlaBlock; ++i) score[i] = kNone;
  for (int64_t i = 0; i < kMlaBlock; i += kLanes) top = vmax(top, load(score + i));
  float lane[kLanes];
  store(lane, top);
  float now = largest;
  for (const float x : lane) now = std::max(now, x);
  Vec sum = {};
  for (int64_t i = 0; i < kMlaBlock; i += kLanes) {
    const Vec weight = vexp(load(score + i) - splat(now));
    store(score + i, weight);
    sum += weight;
  }
  float factor[kLanes];
  store(factor, vexp(splat(largest - now)));
  total = total * factor[0] + reduce_add(sum);
  largest = now;
  return factor[0];
}

// values[h] = values[h] factor[h] + sum_i weight[h][i] row_i over the first `rank` columns.
template <int kHeads, int kVectors, class W, class Lanes>
[[gnu::always_inline]] inline void value_columns(const MlaDecode& p, const Block<W>& block, int64_t column,
                                                 const float (*weight)[kMlaBlock], const float* factor,
                                                 float* values, Lanes lanes) {
  Vec acc[kHeads][kVectors];
#pragma GCC unroll 4
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) {
      acc[h][n] = splat(factor[h]) * load_lanes(values + h * p.rank + column + n * kLanes, lanes);
    }
  }
  for (int64_t i = 0; i < block.rows; ++i) {
    Vec row[kVectors];
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) row[n] = load_row(block.row[i] + column + n * kLanes, lanes);
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
      const Vec left = splat(weight[h][i]);
#pragma GCC unroll 4
      for (int n = 0; n < kVectors; ++n) acc[h][n] = fma(left, row[n], acc[h][n]);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) {
      store_lanes(values + h * p.rank + column + n * kLanes, acc[h][n], lanes);
    }
  }
}

template <int kHeads, class W>
void block_for_heads(const MlaDecode& p, const float* q, const Block<W>& block, float* statistics,
                     float* values) {
  constexpr int kVectors = kLanes / 4;  // with 4 heads half of the registers are sums
  alignas(64) float score[kHeads][kMlaBlock];
  float factor[kHeads];
  score_tile<kHeads>(p, q, block, score);
  for (int h = 0; h < kHeads; ++h) factor[h] = softmax_block(block.rows, score[h], statistics + 2 * h);
  int64_t column = 0;
  for (; column + kVectors * kLanes <= p.rank; column += kVectors * kLanes) {
    value_columns<kHeads, kVectors>(p, block, column, score, factor, values, AllLanes());
  }
  for (; column + kLanes <= p.rank; column += kLanes) {
    value_columns<kHeads, 1>(p, block, column, score, factor, values, AllLanes());
  }
  if (column < p.rank) value_columns<kHeads, 1>(p, block, column, score, factor, values, p.rank - column);
}

template <class W>
void part(const MlaDecode& p, const MlaPart& t) {
  for (int64_t h = t.head; h < t.head_end; ++h) {
    t.statistics[2 * h] = kNone;
    t.statistics[2 * h + 1] = 0;
    std::fill_n(t.values + h * p.rank, p.rank, 0.0f);
  }
  for (int64_t begin = t.begin; begin < t.end;) {
    const int64_t end = std::min(t.end, (begin / kMlaBlock + 1) * kMlaBlock);
    const Block<W> block = block_rows<W>(p, t.sequence, begin, end);
    for (int64_t h = t.head; h < t.head_end;) {
      const float* q = p.q + (t.sequence * p.heads + h) * p.width;
      float* statistics = t.statistics + 2 * h;
      float* values = t.values + h * p.rank;
      const int64_t heads = std::min(kTileHeads, t.head_end - h);
      switch (heads) {
        case 1:
          block_for_heads<1>(p, q, block, statistics, values);
          break;
        case 2:
          block_for_heads<2>(p, q, block, statistics, values);
          break;
        case 3:
          block_for_heads<3>(p, q, block, statistics, values);
          break;
        default:
          block_for_heads<4>(p, q, block, statistics, values);
      }
      h += heads;
    }
    begin = end;
  }
}

}  // namespace

void mla_decode_part(const MlaDecode& p, const MlaPart& t) {
  p.bf16 ? part<uint16_t>(p, t) : part<float>(p, t);
}

void mla_decode_merge(const MlaDecode& p, int64_t parts, const float* statistics, const float* values,
                      float* o) {
  const int64_t next_statistics = 2 * p.heads, next_values = p.heads * p.rank;
  float largest = kNone;
  for (int64_t i = 0; i < parts; ++i) largest = std::max(largest, statistics[i * next_statistics]);
  float total = 0;
  for (int64_t i = 0; i < parts; ++i) {
    float factor[kLanes];
    store(factor, vexp(splat(statistics[i * next_statistics] - largest)));
    total += factor[0] * statistics[i * next_statistics + 1];
    for_vectors(p.rank, [&](int64_t c, auto lanes) {
      const Vec part = load_lanes(values + i * next_values + c, lanes);
      const Vec before = i == 0 ? Vec{} : load_lanes(o + c, lanes);
      store_lanes(o + c, fma(splat(factor[0]), part, before), lanes);
    });
  }
  for_vectors(p.rank, [&](int64_t c, auto lanes) {
    store_lanes(o + c, load_lanes(o + c, lanes) / splat(total), lanes);
  });
}

}  // namespace godwit::kernels::GODWIT_ISA
