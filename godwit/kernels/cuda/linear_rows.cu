// Linear layers of few rows (packed_rows.cuh), and int8 weights as bf16 for a library's product of many.
#include "godwit/kernels/linear_rows_cuda.h"

#include "godwit/kernels/cuda/sm90/packed_rows.cuh"

namespace godwit::kernels::cuda {
namespace {

using sm90::PackedForm;
using sm90::Packing;

// A block's four warps share a sum, or each has 32 features of its own, where they are many.
constexpr int64_t kManyFeatures = 16384;  // 128 of them a block, a block for every multiprocessor

constexpr int kUnpackThreads = 256;

// Sixteen values of a row a thread.
__global__ void __launch_bounds__(kUnpackThreads)
    unpack_kernel(const uint4* w, const float* scale, int units, int64_t all, uint4* out) {
  const int64_t i = int64_t(blockIdx.x) * kUnpackThreads + threadIdx.x;
  if (i >= all) return;
  const uint4 v = w[i];
  const float s = scale[i / units];
  const uint32_t word[4] = {v.x, v.y, v.z, v.w};
  uint32_t pair[8];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const auto value = [&](int b) { return s * float(int8_t(word[j] >> 8 * b)); };
    pair[2 * j] = sm90::pack_bf16(value(0), value(1)), pair[2 * j + 1] = sm90::pack_bf16(value(2), value(3));
  }
  out[2 * i] = {pair[0], pair[1], pair[2], pair[3]};
  out[2 * i + 1] = {pair[4], pair[5], pair[6], pair[7]};
}

}  // namespace

bool linear_rows_takes(int64_t in, int64_t out) {
  return in > 0 && out > 0 && in % 16 == 0 && in < int64_t{1} << 30 && out < int64_t{1} << 30;
}

int64_t linear_rows_most(int64_t in, int64_t out, bool int8) {
  constexpr int64_t kSmall = int64_t{1} << 22;
  return int8 ? 64 : in * out <= kSmall ? 32 : 16;
}

int linear_rows(const LinearRowsParams& p) {
  if (p.rows == 0) return cudaSuccess;
  sm90::PackedListArgs list;
  list.base.width = int(p.in), list.base.rows = int(p.rows), list.count = p.count;
  list.base.x = static_cast<const __nv_bfloat16*>(p.x);
  int64_t features = 0;
  for (int i = 0; i < p.count; ++i) {
    list.matrix[i] = {static_cast<const uint8_t*>(p.w[i]), p.scale[i]};
    list.features[i] = int(p.out[i]), list.out[i] = static_cast<__nv_bfloat16*>(p.y[i]);
    features += p.out[i];
  }
  if (!p.int8) return sm90::launch_packed_list<Packing::kBf16, PackedForm<4, 1, 16>>(list, p.stream);
  return features >= kManyFeatures
             ? sm90::launch_packed_list<Packing::kInt8, PackedForm<1, 2, 32>>(list, p.stream)
             : sm90::launch_packed_list<Packing::kInt8, PackedForm<4, 2, 16>>(list, p.stream);
}

int unpack_int8(const UnpackInt8Params& p) {
  const int64_t all = p.in / 16 * p.out;
  if (all == 0) return cudaSuccess;
  unpack_kernel<<<unsigned((all + kUnpackThreads - 1) / kUnpackThreads), kUnpackThreads, 0, p.stream>>>(
      reinterpret_cast<const uint4*>(p.w), p.scale, int(p.in / 16), all, static_cast<uint4*>(p.y));
  return cudaGetLastError();
}

}  // namespace godwit::kernels::cuda
