// The parts of gemm that are compiled for each instruction set; dispatch/gemm.cpp cuts the work.
#pragma once

#include "godwit/kernels/gemm.h"

namespace godwit::kernels {

// B is repacked once into panels of this many columns, [depth][kGemmPanel] each, zero beyond n. (Both
// instruction sets divide it into panels of their own width, see tile.h.)
inline constexpr int64_t kGemmPanel = 32;
inline constexpr int64_t kGemmRows = 192;   // rows of a block of A, copied to lie in the second-level cache
inline constexpr int64_t kGemmDepth = 256;  // depth done at a time: a panel's part fits the first-level cache

inline int64_t gemm_block_floats() {
  return kGemmRows * (kGemmDepth + 16) + 16 * kGemmDepth;
}

#define GODWIT_DECLARE(isa)                                                                          \
  namespace isa {                                                                                    \
  /* Panels [begin, end) of B. */                                                                    \
  void gemm_pack(const Gemm& args, int64_t begin, int64_t end, float* panels);                       \
  /* Rows [row, row + rows) of C, columns of the panels [begin, end); block: gemm_block_floats(). */ \
  void gemm_block(const Gemm& args, int64_t row, int64_t rows, int64_t begin, int64_t end,           \
                  const float* panels, float* block);                                                \
  /* At most gemm_few_rows() rows: columns [begin, end), B read once and not repacked. */            \
  int64_t gemm_few_rows();                                                                           \
  void gemm_few(const Gemm& args, int64_t begin, int64_t end);                                       \
  }
GODWIT_DECLARE(avx2)
GODWIT_DECLARE(avx512)
#undef GODWIT_DECLARE

}  // namespace godwit::kernels
