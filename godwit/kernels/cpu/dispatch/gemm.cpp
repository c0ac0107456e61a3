#include "godwit/kernels/gemm.h"

#include <algorithm>

#include "godwit/base/parallel.h"
#include "godwit/kernels/cpu/dispatch/isa.h"
#include "godwit/kernels/cpu/dispatch/scratch.h"
#include "godwit/kernels/cpu/gemm_isa.h"

namespace godwit::kernels {
namespace {

constexpr int64_t kGrainProducts = int64_t{1} << 18;  // multiply-adds worth a thread

int64_t grain(int64_t products_each) {
  return std::max<int64_t>(1, kGrainProducts / std::max<int64_t>(1, products_each));
}

// Columns of C that a thread takes at a time: of B they fit the first-level cache.
constexpr int64_t kStrip = 16;
// Up to so many rows B is read as it is, a strip of it again for each few rows; beyond it is repacked.
constexpr int64_t kMostFewRows = 32;

int64_t strips_of(const Gemm& g) {
  return (g.n + kStrip - 1) / kStrip;
}

// Strips [begin, end) of one product, all its rows.
void few_rows_strips(const Gemm& g, int64_t begin, int64_t end) {
  const int64_t few = GODWIT_DISPATCH(gemm_few_rows);
  if (g.m <= few) return GODWIT_DISPATCH(gemm_few, g, begin * kStrip, std::min(g.n, end * kStrip));
  const int64_t groups = (g.m + few - 1) / few;
  for (int64_t strip = begin; strip < end; ++strip) {
    for (int64_t i = 0; i < groups; ++i) {
      const int64_t row = g.m * i / groups;
      Gemm part = g;
      part.m = g.m * (i + 1) / groups - row;
      part.a.data = g.a.data + row * g.a.stride;
      part.c = g.c + row * g.c_stride;
      GODWIT_DISPATCH(gemm_few, part, strip * kStrip, std::min(g.n, (strip + 1) * kStrip));
    }
  }
}

bool takes_few_rows(const Gemm& g) {
  return g.m <= kMostFewRows && !g.a.transposed && !g.accumulate;
}

}  // namespace

void gemm_group(const Gemm* products, int64_t count) {
  int64_t strips = 0, work = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (!takes_few_rows(products[i])) {
      for (int64_t j = 0; j < count; ++j) gemm(products[j]);
      return;
    }
    strips += strips_of(products[i]);
    work += products[i].m * products[i].n * products[i].depth;
  }
  if (strips == 0) return;
  parallel_for(0, strips, grain(work / strips), [&](int64_t begin, int64_t end) {
    int64_t first = 0;  // strip of the product
    for (const Gemm* g = products; g < products + count && first < end; ++g) {
      const int64_t own = strips_of(*g), from = std::max(begin, first), to = std::min(end, first + own);
      if (from < to && g->m > 0) few_rows_strips(*g, from - first, to - first);
      first += own;
    }
  });
}

void gemm(const Gemm& g) {
  if (g.m <= 0 || g.n <= 0) return;
  if (takes_few_rows(g)) return gemm_group(&g, 1);
  const int64_t panels = (g.n + kGemmPanel - 1) / kGemmPanel;
  const Scratch packed(panels * kGemmPanel * g.depth);
  parallel_for(0, panels, grain(kGemmPanel * g.depth),
               [&](int64_t begin, int64_t end) { GODWIT_DISPATCH(gemm_pack, g, begin, end, packed.data()); });
  // Blocks of rows, cut further by columns until every thread has some; the cut changes no bit of the result.
  const int64_t blocks = (g.m + kGemmRows - 1) / kGemmRows;
  const int64_t wanted = 4 * num_threads();
  const int64_t groups = std::clamp<int64_t>((wanted + blocks - 1) / blocks, 1, panels);
  parallel_for(0, blocks * groups, grain(g.m * g.n * g.depth / (blocks * groups)),
               [&](int64_t begin, int64_t end) {
                 float* block = thread_scratch(gemm_block_floats());
                 for (int64_t i = begin; i < end; ++i) {
                   const int64_t b = i / groups, group = i % groups;
                   const int64_t row = g.m * b / blocks, rows = g.m * (b + 1) / blocks - row;
                   GODWIT_DISPATCH(gemm_block, g, row, rows, panels * group / groups,
                                   panels * (group + 1) / groups, packed.data(), block);
                 }
               });
}

}  // namespace godwit::kernels
