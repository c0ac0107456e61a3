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

void few_rows(const Gemm& g) {
  const int64_t strips = (g.n + 15) / 16;
  parallel_for(0, strips, grain(16 * g.depth * g.m), [&](int64_t begin, int64_t end) {
    GODWIT_DISPATCH(gemm_few, g, begin * 16, std::min(g.n, end * 16));
  });
}

}  // namespace

void gemm(const Gemm& g) {
  if (g.m <= 0 || g.n <= 0) return;
  const int64_t few = GODWIT_DISPATCH(gemm_few_rows);
  if (g.m <= few && g.b.transposed && !g.a.transposed && !g.accumulate) return few_rows(g);
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
