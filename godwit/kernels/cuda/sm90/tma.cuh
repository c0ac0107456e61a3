// The tensor copy engine: tensor maps on the host, loads of boxes on the device; registers and barriers of
// warpgroups.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "godwit/kernels/cuda/sm90/ptx.cuh"

namespace godwit::kernels::cuda::sm90 {

// A bf16 tensor of up to three dimensions, the first contiguous, and the box that one load takes. A box's
// first dimension is 64 values: one 128-byte row of shared memory, whose 16-byte unit u stands at u ^ (row &
// 7).
struct TensorBox {
  const void* base = nullptr;
  uint64_t size[3] = {1, 1, 1};
  uint64_t stride[2] = {0, 0};  // values between steps of dimensions 1 and 2
  uint32_t box[3] = {64, 1, 1};
};

// Bytes (MXFP4 codes and scales): swizzled the same way if a row of the box has 128, or not.
enum class BoxType { kBf16Swizzled, kBytesSwizzled, kBytes };

inline cudaError_t make_tensor_map(CUtensorMap* map, const TensorBox& t,
                                   BoxType type = BoxType::kBf16Swizzled) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static const Encode encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(entry)
                                                                        : nullptr;
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  const bool bf16 = type == BoxType::kBf16Swizzled;
  const uint64_t bytes = bf16 ? 2 : 1;
  const cuuint64_t strides[2] = {t.stride[0] * bytes, t.stride[1] * bytes};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result =
      encode(map, bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8, 3,
             const_cast<void*>(t.base), t.size, strides, t.box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             type == BoxType::kBytes ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// A box to shared memory; completes on `bar`. What lies outside the tensor is zeros.
__device__ __forceinline__ void tensor_load(void* shared, const CUtensorMap* map, int c0, int c1, int c2,
                                            uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%2,%3,%4}], [%5];" ::"r"(smem_address(shared)),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(smem_address(bar))
      : "memory");
}
// A kernel's tensor map on its way before the first load needs it.
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
template <int kRegisters>
__device__ __forceinline__ void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace godwit::kernels::cuda::sm90
