// Linear layers of few rows on a Hopper GPU: raw device pointers, no torch. y_i = x w_i^T for up to kMost
// matrices of one input: w_i [out_i, in] in bf16, or int8 with a float a row; x [rows, in] and y_i [rows,
// out_i] in bf16, sums in fp32; `in` a multiple of 16. Launchers only enqueue work and return a cudaError_t
// as int.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace godwit::kernels::cuda {

struct LinearRowsParams {
  static constexpr int kMost = 8;
  int64_t rows = 0;
  int64_t in = 0;
  int count = 0;
  int64_t out[kMost] = {};
  const void* w[kMost] = {};
  const float* scale[kMost] = {};  // int8 only
  void* y[kMost] = {};
  bool int8 = false;
  const void* x = nullptr;
  CUstream_st* stream = nullptr;
};
bool linear_rows_takes(int64_t in, int64_t out);
// Up to how many rows this is quicker than a library's products, of `out` features together: of int8 weights,
// which those must have unpacked, and of bf16, where small ones cost more to start than to do.
int64_t linear_rows_most(int64_t in, int64_t out, bool int8);
int linear_rows(const LinearRowsParams& p);

// int8 weights in bf16.
struct UnpackInt8Params {
  int64_t in = 0;
  int64_t out = 0;
  const int8_t* w = nullptr;
  const float* scale = nullptr;
  void* y = nullptr;  // [out, in]
  CUstream_st* stream = nullptr;
};
int unpack_int8(const UnpackInt8Params& p);

}  // namespace godwit::kernels::cuda
