// Queries and keys of the vision tower turned by their places, and the three parts of qkv taken apart, in one
// pass; the backward turns back and puts them together. A thread has eight channels of one head of one part:
//   (a, b) -> (a cos - b sin, a sin + b cos)       backward: (a cos + b sin, b cos - a sin)
// turns [P, d / 2] of (cos, sin) fp32 are read once a head and stay in the L2 cache.
#include <algorithm>

#include "godwit/kernels/cuda/sm90/rows.cuh"
#include "godwit/kernels/rotate_qkv.h"

namespace godwit::kernels::cuda {
namespace {

using namespace sm90;

constexpr int kThreads = 256;

template <bool kBackward>
__global__ void __launch_bounds__(kThreads) rotate_kernel(const __grid_constant__ RotateParams p) {
  const uint32_t per_head = uint32_t(p.width) / kVector, heads = uint32_t(p.heads);
  const int64_t units = p.rows * 3 * heads * per_head, step = int64_t(gridDim.x) * kThreads;
  for (int64_t unit = int64_t(blockIdx.x) * kThreads + threadIdx.x; unit < units; unit += step) {
    const int64_t group = unit / per_head;
    const uint32_t c = uint32_t(unit - group * per_head);
    const int64_t part_of_row = group / heads;
    const uint32_t head = uint32_t(group - part_of_row * heads);
    const int64_t row = part_of_row / 3;
    const int which = int(part_of_row - row * 3);
    const int64_t apart = (row * heads + head) * per_head + c;
    const void* part = which == 0 ? p.q : which == 1 ? p.k : p.v;
    Eight x = unpack(kBackward ? load_unit(part, apart) : load_unit(p.qkv, unit));
    if (which < 2) {
      const float4* turns = reinterpret_cast<const float4*>(p.turns) + (row * per_head + c) * 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 t = __ldg(turns + i);
        const float s0 = kBackward ? -t.y : t.y, s1 = kBackward ? -t.w : t.w;
        const float a = x.x[4 * i], b = x.x[4 * i + 1], e = x.x[4 * i + 2], f = x.x[4 * i + 3];
        x.x[4 * i] = a * t.x - b * s0, x.x[4 * i + 1] = a * s0 + b * t.x;
        x.x[4 * i + 2] = e * t.z - f * s1, x.x[4 * i + 3] = e * s1 + f * t.z;
      }
    }
    if constexpr (kBackward)
      store_unit(p.qkv, unit, x);
    else
      store_unit(const_cast<void*>(part), apart, x);
  }
}

template <bool kBackward>
int launch(const RotateParams& p) {
  if (p.rows == 0 || p.heads == 0 || p.width == 0) return cudaSuccess;
  if (p.width % kVector != 0) return cudaErrorInvalidValue;
  const int64_t units = p.rows * 3 * p.heads * (p.width / kVector);
  const int64_t blocks = (units + kThreads - 1) / kThreads;
  rotate_kernel<kBackward><<<unsigned(std::min<int64_t>(blocks, 1 << 20)), kThreads, 0, p.stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

int rotate_qkv_fwd(const RotateParams& p) {
  return launch<false>(p);
}
int rotate_qkv_bwd(const RotateParams& p) {
  return launch<true>(p);
}

}  // namespace godwit::kernels::cuda
