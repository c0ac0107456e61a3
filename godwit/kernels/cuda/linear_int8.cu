// Linear layers with int8 weights: few rows through packed_rows.cuh, for many the weights as bf16 for a
// library's product.
#include "godwit/kernels/linear_int8_cuda.h"

#include "godwit/kernels/cuda/sm90/packed_rows.cuh"

namespace godwit::kernels::cuda {
namespace {

// A block's four warps share a sum, or each has 32 features of its own, where they are many.
using Shared = sm90::PackedForm<4, 2, 16>;
using Apart = sm90::PackedForm<1, 2, 32>;
constexpr int64_t kManyFeatures = 16384;  // 128 of them a block, a block for every multiprocessor

template <class Form>
cudaError_t launch(const sm90::PackedRowsArgs& args, cudaStream_t stream) {
  return sm90::launch_packed_rows<sm90::Packing::kInt8, false, Form>(
      args, (args.rows + Form::kMostRows - 1) / Form::kMostRows, stream);
}

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

bool linear_int8_takes(int64_t in, int64_t out) {
  return in > 0 && out > 0 && in % 16 == 0 && out % 8 == 0 && in < int64_t{1} << 30 && out < int64_t{1} << 30;
}

int64_t linear_int8_most_rows() {
  return 64;
}

int linear_int8(const LinearInt8Params& p) {
  if (p.rows == 0) return cudaSuccess;
  sm90::PackedRowsArgs args;
  args.first = {reinterpret_cast<const uint8_t*>(p.w), p.scale};
  args.features = int(p.out), args.width = int(p.in), args.rows = int(p.rows);
  args.x = static_cast<const __nv_bfloat16*>(p.x), args.out = static_cast<__nv_bfloat16*>(p.y);
  return p.out >= kManyFeatures ? launch<Apart>(args, p.stream) : launch<Shared>(args, p.stream);
}

int unpack_int8(const LinearInt8Params& p) {
  const int64_t all = p.in / 16 * p.out;
  if (all == 0) return cudaSuccess;
  unpack_kernel<<<unsigned((all + kUnpackThreads - 1) / kUnpackThreads), kUnpackThreads, 0, p.stream>>>(
      reinterpret_cast<const uint4*>(p.w), p.scale, int(p.in / 16), all, static_cast<uint4*>(p.y));
  return cudaGetLastError();
}

}  // namespace godwit::kernels::cuda
