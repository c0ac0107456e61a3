// Linear layers with int8 weights on a Hopper GPU: raw device pointers, no torch. w [out, in] int8 with a
// float a row; x [rows, in] and y [rows, out] in bf16, sums in fp32; `in` a multiple of 16, `out` of 8.
// Launchers only enqueue work and return a cudaError_t as int.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace godwit::kernels::cuda {

struct LinearInt8Params {
  int64_t rows = 0;
  int64_t in = 0;
  int64_t out = 0;
  const int8_t* w = nullptr;
  const float* scale = nullptr;
  const void* x = nullptr;
  void* y = nullptr;
  CUstream_st* stream = nullptr;
};
bool linear_int8_takes(int64_t in, int64_t out);
// Up to how many rows the product with packed weights is quicker than one with unpacked ones.
int64_t linear_int8_most_rows();
// y = x w^T, a feature's sum times its scale.
int linear_int8(const LinearInt8Params& p);
// The weights in bf16, [out, in], into y.
int unpack_int8(const LinearInt8Params& p);

}  // namespace godwit::kernels::cuda
