// qkv [P, 3, H, d] in bf16 taken apart into q, k, v [P, H, d], with neighbouring channels of q and k turned
// by turns [P, d / 2] of (cos, sin) fp32; the backward takes gradients q, k, v and writes qkv. d is a
// multiple of
// 8. As of layer_gpu.h: raw pointers aligned to 16 bytes, a cudaError_t as int (0 = launched).
#pragma once

#include <cstdint>

struct CUstream_st;

namespace godwit::kernels::cuda {

struct RotateParams {
  int64_t rows = 0;
  int heads = 0, width = 0;
  const float* turns = nullptr;
  void *q = nullptr, *k = nullptr, *v = nullptr;
  void* qkv = nullptr;
  CUstream_st* stream = nullptr;
};
int rotate_qkv_fwd(const RotateParams& p);
int rotate_qkv_bwd(const RotateParams& p);

}  // namespace godwit::kernels::cuda
