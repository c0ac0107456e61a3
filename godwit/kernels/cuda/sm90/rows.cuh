// What the row-wise kernels share: bf16 vectors of eight, parameter vectors of either type, sums over lanes.
#pragma once

#include "godwit/kernels/cuda/sm90/ptx.cuh"
#include "godwit/kernels/layer_gpu.h"

namespace godwit::kernels::cuda::sm90 {

constexpr int kVector = 8;  // bf16 values in 16 bytes
constexpr uint32_t kAllLanes = 0xffffffffu;

struct Eight {
  float x[kVector];
};

__device__ __forceinline__ Eight unpack(uint4 v) {
  return {low_bf16(v.x), high_bf16(v.x), low_bf16(v.y), high_bf16(v.y),
          low_bf16(v.z), high_bf16(v.z), low_bf16(v.w), high_bf16(v.w)};
}
__device__ __forceinline__ uint4 pack(const Eight& v) {
  return make_uint4(pack_bf16(v.x[0], v.x[1]), pack_bf16(v.x[2], v.x[3]), pack_bf16(v.x[4], v.x[5]),
                    pack_bf16(v.x[6], v.x[7]));
}
// Vector `unit` of a bf16 array; read or written once, so past the caches.
__device__ __forceinline__ uint4 load_unit(const void* p, int64_t unit) {
  return __ldcs(static_cast<const uint4*>(p) + unit);
}
__device__ __forceinline__ void store_unit(void* p, int64_t unit, const Eight& v) {
  __stcs(static_cast<uint4*>(p) + unit, pack(v));
}

__device__ __forceinline__ float weight_at(const WeightVector& w, int i) {
  return w.bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(w.data)[i])
                : static_cast<const float*>(w.data)[i];
}
__device__ __forceinline__ void write_weight(const WeightGradient& w, int i, float x) {
  if (w.bf16)
    static_cast<__nv_bfloat16*>(w.data)[i] = __float2bfloat16(x);
  else
    static_cast<float*>(w.data)[i] = x;
}

template <int kLanes = 32>
__device__ __forceinline__ float lane_sum(float x) {
#pragma unroll
  for (int m = kLanes / 2; m > 0; m /= 2) x += __shfl_xor_sync(kAllLanes, x, m);
  return x;
}

// CTAs of `kernel` that are on the device at once.
template <class Kernel>
cudaError_t resident_grid(Kernel kernel, int threads, size_t shared_bytes, int* grid) {
  int device = 0, processors = 0, each = 0;
  cudaError_t e =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
  if (e == cudaSuccess) e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (e == cudaSuccess)
    e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, shared_bytes);
  *grid = processors * each;
  return e;
}

}  // namespace godwit::kernels::cuda::sm90
