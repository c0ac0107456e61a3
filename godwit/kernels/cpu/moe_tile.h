// What the two passes of moe_experts share: how an expert's rows are cut into blocks, the expert's weights
// and their packing.
#pragma once

#include <algorithm>

#include "godwit/kernels/cpu/moe_experts_isa.h"
#include "godwit/kernels/cpu/tile.h"

namespace godwit::kernels::GODWIT_ISA {

template <class W>
struct Expert {
  const W* w1;
  const W* w3;
  const W* w2;
};

template <class W>
static inline Expert<W> expert_of(const MoeWeights& w, const MoeShape& s, int64_t e) {
  const int64_t offset = e * s.inner * s.width;
  return {static_cast<const W*>(w.w1) + offset, static_cast<const W*>(w.w3) + offset,
          static_cast<const W*>(w.w2) + offset};
}

// fn(first row, rows) over blocks of nearly equal length.
template <class Fn>
static inline void for_blocks(const MoePart& part, const Fn& fn) {
  const int64_t rows = part.end - part.begin;
  const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
  int64_t at = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t m = (rows - at) / (blocks - b);
    fn(part.begin + at, m);
    at += m;
  }
}

// copy(r) for each of m rows, whose `width` floats lie at row(r): asked for a few rows ahead, since rows of
// other tokens come from the shared cache at best.
template <class Row, class Copy>
static inline void gather_rows(int64_t m, int64_t width, const Row& row, const Copy& copy) {
  constexpr int64_t kAhead = 6;
  for (int64_t r = 0; r < m && r < kAhead; ++r) prefetch(row(r), width);
  for (int64_t r = 0; r < m; ++r) {
    if (r + kAhead < m) prefetch(row(r + kAhead), width);
    copy(r);
  }
}

// Panel [L][kLanes columns of W1^T | the same of W3^T], inner columns from i0.
template <class W>
static inline void pack_pair(float* panel, const Expert<W>& w, const MoeShape& s, int64_t i0) {
  const int64_t first = std::min(i0, s.inner), rows = s.inner - first;
  pack_transposed(panel, w.w1 + first * s.width, s.width, rows, s.width, kLanes);
  pack_transposed(panel + kLanes, w.w3 + first * s.width, s.width, rows, s.width, kLanes);
}

}  // namespace godwit::kernels::GODWIT_ISA
