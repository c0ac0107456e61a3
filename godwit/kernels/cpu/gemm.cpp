// See kernels/gemm.h. A block of A is copied so that its rows lie an odd number of cache lines apart (or,
// transposed, so that a tile's rows are neighbours); a panel of B stays in the first-level cache while all
// its rows pass.
#include "godwit/kernels/cpu/gemm_isa.h"
#include "godwit/kernels/cpu/weight_rows.h"

namespace godwit::kernels::GODWIT_ISA {
namespace {

constexpr int64_t kHalves = kGemmPanel / kPanel;  // own panels in one of kGemmPanel columns

constexpr int64_t kLdA = kGemmDepth + 16;  // of the copied block, rows of A
constexpr int64_t kLdT = kGemmRows + 16;   // of the copied block, rows of A^T

// One panel of kPanel columns against the copied block: written to, or added to, `columns` columns of C.
template <bool kTransposed>
void panel_product(int64_t rows, int64_t depth, const float* block, const float* panel, float* c,
                   int64_t stride, int64_t columns, bool add) {
  const int64_t ld = kTransposed ? kLdT : kLdA;
  gemm_panel<kTransposed>(rows, depth, block, ld, panel, ZeroInit(), [&](int64_t r, Vec c0, Vec c1) {
    float* to = c + r * stride;
    if (columns >= kPanel) {
      store(to, add ? load(to) + c0 : c0);
      store(to + kLanes, add ? load(to + kLanes) + c1 : c1);
    } else {
      const int64_t second = columns - kLanes;
      store_part(to, add ? load_part(to, columns) + c0 : c0, columns);
      store_part(to + kLanes, add ? load_part(to + kLanes, second) + c1 : c1, second);
    }
  });
}

Int8Rows int8_rows(const Gemm& g) {
  return {g.b_int8, g.b.stride, g.b_scale};
}

// A's rows [row, row + rows), depth [from, from + depth).
void copy_block(const GemmOperand& a, int64_t row, int64_t rows, int64_t from, int64_t depth, float* block) {
  if (a.transposed) {
    for (int64_t d = 0; d < depth; ++d) {
      std::memcpy(block + d * kLdT, a.data + (from + d) * a.stride + row, rows * sizeof(float));
    }
  } else {
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(block + r * kLdA, a.data + (row + r) * a.stride + from, depth * sizeof(float));
    }
  }
}

}  // namespace

// Own panels follow one another: column c lies in panel c / kPanel, at panels + (c / kPanel) * depth *
// kPanel.
void gemm_pack(const Gemm& g, int64_t begin, int64_t end, float* panels) {
  for (int64_t p = begin * kHalves; p < end * kHalves; ++p) {
    float* panel = panels + p * g.depth * kPanel;
    const int64_t first = p * kPanel, columns = g.n - first;
    if (g.b.transposed) {
      for (int64_t half = 0; half < kPanel; half += kLanes) {
        const int64_t at = first + half < g.n ? first + half : g.n;
        if (g.b_int8 != nullptr) {
          pack_weight_rows(panel + half, int8_rows(g).from(at), g.n - at, g.depth, kPanel);
        } else {
          pack_transposed(panel + half, g.b.data + at * g.b.stride, g.b.stride, g.n - at, g.depth, kPanel);
        }
      }
    } else if (columns > 0) {
      for (int64_t d = 0; d < g.depth; ++d) {
        pack_row(panel, g.depth, d, g.b.data + d * g.b.stride + first, columns < kPanel ? columns : kPanel);
      }
    }
  }
}

void gemm_block(const Gemm& g, int64_t row, int64_t rows, int64_t begin, int64_t end, const float* panels,
                float* block) {
  for (int64_t from = 0; from == 0 || from < g.depth; from += kGemmDepth) {
    const int64_t depth = g.depth - from < kGemmDepth ? g.depth - from : kGemmDepth;
    copy_block(g.a, row, rows, from, depth, block);
    const bool add = g.accumulate || from > 0;
    for (int64_t p = begin * kHalves; p < end * kHalves && p * kPanel < g.n; ++p) {
      const float* panel = panels + (p * g.depth + from) * kPanel;
      float* c = g.c + row * g.c_stride + p * kPanel;
      const int64_t columns = g.n - p * kPanel;
      g.a.transposed ? panel_product<true>(rows, depth, block, panel, c, g.c_stride, columns, add)
                     : panel_product<false>(rows, depth, block, panel, c, g.c_stride, columns, add);
    }
  }
}

namespace {

// kLanes columns of C at a time: rows of B^T transposed in registers and used at once.
template <int kRows, class Rows>
void few(const Gemm& g, const Rows& b, int64_t begin, int64_t end) {
  for (int64_t n = begin; n < end; n += kLanes) {
    Vec total[kRows] = {};
    for (int64_t from = 0; from < g.depth; from += kGemmDepth) {
      const int64_t until = g.depth - from < kGemmDepth ? g.depth : from + kGemmDepth;
      Vec sum[kRows] = {};
      for (int64_t d = from; d < until; d += kLanes) {
        const int64_t depth = until - d < kLanes ? until - d : kLanes;
        b.from(n + kLanes).prefetch(d, g.n - n - kLanes);
        Vec block[kLanes];
        b.from(n).load(d, g.n - n, depth, block);
        for (int64_t j = 0; j < depth; ++j) {
#pragma GCC unroll 12
          for (int r = 0; r < kRows; ++r)
            sum[r] = fma(splat(g.a.data[r * g.a.stride + d + j]), block[j], sum[r]);
        }
      }
      for (int r = 0; r < kRows; ++r) total[r] = from == 0 ? sum[r] : total[r] + sum[r];
    }
    for (int r = 0; r < kRows; ++r) store_part(g.c + r * g.c_stride + n, total[r], end - n);
  }
}

// B as it is: its rows are what the columns of C take.
struct PlainColumns {
  const float* data;
  int64_t stride;
};

template <int kRows>
void few(const Gemm& g, const PlainColumns& b, int64_t begin, int64_t end) {
  for (int64_t n = begin; n < end; n += kLanes) {
    Vec total[kRows] = {};
    for (int64_t from = 0; from < g.depth; from += kGemmDepth) {
      const int64_t until = g.depth - from < kGemmDepth ? g.depth : from + kGemmDepth;
      Vec sum[kRows] = {};
      for (int64_t d = from; d < until; ++d) {
        const Vec row = load_part(b.data + d * b.stride + n, g.n - n);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) sum[r] = fma(splat(g.a.data[r * g.a.stride + d]), row, sum[r]);
      }
      for (int r = 0; r < kRows; ++r) total[r] = from == 0 ? sum[r] : total[r] + sum[r];
    }
    for (int r = 0; r < kRows; ++r) store_part(g.c + r * g.c_stride + n, total[r], end - n);
  }
}

template <class Columns>
void few_rows(const Gemm& g, const Columns& b, int64_t begin, int64_t end) {
  switch (g.m) {
#define GODWIT_FEW(n) \
  case n:             \
    return few<n>(g, b, begin, end);
    GODWIT_FEW(1)
    GODWIT_FEW(2)
    GODWIT_FEW(3)
    GODWIT_FEW(4)
#ifdef __AVX512F__
    GODWIT_FEW(5)
    GODWIT_FEW(6)
    GODWIT_FEW(7)
    GODWIT_FEW(8)
#endif
#undef GODWIT_FEW
    default:
      __builtin_unreachable();
  }
}

}  // namespace

int64_t gemm_few_rows() {
  return kTallTile > 8 ? 8 : 4;
}

void gemm_few(const Gemm& g, int64_t begin, int64_t end) {
  if (g.b_int8 != nullptr) return few_rows(g, int8_rows(g), begin, end);
  g.b.transposed ? few_rows(g, PlainRows<float>{g.b.data, g.b.stride}, begin, end)
                 : few_rows(g, PlainColumns{g.b.data, g.b.stride}, begin, end);
}

}  // namespace godwit::kernels::GODWIT_ISA
