// The parts of moe_experts that are compiled for each instruction set; dispatch/moe_experts.cpp spreads them
// over the threads.
#pragma once

#include <algorithm>

#include "godwit/kernels/moe_experts.h"

namespace godwit::kernels {

// Where a part's rows of the sorted order lie, and where its results go.
struct MoeForwardPart {
  MoePart part;
  const int32_t* slot_of_row;
  float* y;        // [T k, moe_padded(L)] in slot order
  bool large;      // y is larger than the caches
  float* scratch;  // moe_fwd_scratch floats
};

struct MoeBackwardPart {
  MoePart part;
  const int32_t* slot_of_row;
  float* d_x;   // [T k, moe_padded(L)] in slot order, or null
  bool large;   // d_x is larger than the caches
  float* d_w1;  // this part's sums [I, L], [I, L], [L, I], written; or null
  float* d_w3;
  float* d_w2;
  float* scratch;  // moe_bwd_scratch floats
};

// Rows handled together: their matrices stay in the second-level cache beside one panel of weights.
inline constexpr int64_t kBlockRows = 192;

// Floats from row to row inside a block: an odd number of cache lines, so that a column of rows does not fall
// into a few sets of the first-level cache.
inline int64_t row_stride(int64_t width) {
  return moe_padded(width) + 16;
}

// Floats of work memory. Forward: X, A, a panel's G and U, and a panel; backward: see moe_experts_bwd.cpp.
inline int64_t moe_fwd_scratch(const MoeShape& s) {
  return kBlockRows * (row_stride(s.width) + row_stride(s.inner) + 32) +
         32 * (moe_padded(s.width) + moe_padded(s.inner));
}
inline int64_t moe_bwd_scratch(const MoeShape& s) {
  const int64_t width = moe_padded(s.width), inner = moe_padded(s.inner);
  const int64_t rows = row_stride(s.width) + width + row_stride(2 * inner) + row_stride(inner) + inner;
  const int64_t recompute = row_stride(s.width);
  return kBlockRows * (rows + recompute + 1) + 32 * std::max(width, 2 * inner) + 3 * width * inner;
}

#define GODWIT_DECLARE(isa)                                                                                 \
  namespace isa {                                                                                           \
  void moe_fwd_part(const MoeForward& args, const MoeForwardPart& task);                                    \
  void moe_bwd_part(const MoeBackward& args, const MoeBackwardPart& task);                                  \
  /* out_t = sum_i weights_ti y_ti for tokens [begin, end); weights null = 1. */                            \
  void moe_combine(const MoeShape& shape, int64_t begin, int64_t end, const float* y, const float* weights, \
                   float* out);                                                                             \
  void add_to(int64_t n, const float* x, float* sum);                                                       \
  }
GODWIT_DECLARE(avx2)
GODWIT_DECLARE(avx512)
#undef GODWIT_DECLARE

}  // namespace godwit::kernels
