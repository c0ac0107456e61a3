// General matrix product in fp32 on the CPU, C [m, n] (+)= op(A) [m, depth] op(B) [depth, n], all row-major.
//
// Every element of C is summed the same way wherever it lies and however many rows or threads there are: over
// blocks of 256 of depth, each a chain of fused multiply-adds from zero in ascending order, the blocks added
// in order. So row r of the result depends on row r of op(A) only, bit for bit: a batch and each of its rows
// alone agree, which library GEMMs do not promise.
//
// B^T may be stored as int8 rows with a scale each: b_nk = int8 * scale_n, rounded to fp32 in registers, so
// the bits are those of the product with that matrix in fp32.
#pragma once

#include <cstdint>

namespace godwit::kernels {

struct GemmOperand {
  const float* data = nullptr;
  int64_t stride = 0;       // floats from row to row as stored
  bool transposed = false;  // stored [m or n swapped with depth]: op(X) = X^T
};

struct Gemm {
  int64_t m = 0;
  int64_t n = 0;
  int64_t depth = 0;
  GemmOperand a;
  GemmOperand b;
  const int8_t* b_int8 = nullptr;  // in place of b.data, [n][b.stride], with b.transposed
  const float* b_scale = nullptr;  // [n]
  float* c = nullptr;
  int64_t c_stride = 0;
  bool accumulate = false;  // C +=
};
void gemm(const Gemm& args);

// Products of a few rows (of steps), one loop for all of them: the bits of gemm for each. a not transposed,
// no accumulation.
void gemm_group(const Gemm* products, int64_t count);

}  // namespace godwit::kernels
