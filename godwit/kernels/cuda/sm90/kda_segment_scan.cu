// Joins segment maps: S_(i+1) = A_i S_i + B_i in fp32, one CTA per head and 16 state columns, serial over the
// segments of one sequence. Writes S_i, the state that enters segment i, for i > 0. Maps arrive in shared
// memory one segment ahead by bulk copies.
#include "godwit/kernels/cuda/sm90/kda_launch.cuh"
#include "godwit/kernels/cuda/sm90/kda_segment.cuh"

namespace godwit::kernels::cuda::sm90 {
namespace {

constexpr int kColumns = 16;
constexpr int kRowFloats = kWidth + 4;  // padded row of A

constexpr int kThreads = 256;

struct ScanShared {
  alignas(128) float A[2][kWidth * kRowFloats];
  alignas(128) float B[2][kWidth * kColumns];
  alignas(16) float S[kWidth * kColumns];
  alignas(8) uint64_t full[2];
};

__global__ void __launch_bounds__(kThreads)
    scan_kernel(KdaInputs in, const float* maps, float* states, int64_t units) {
  extern __shared__ __align__(128) uint8_t dynamic[];
  auto& shared = *reinterpret_cast<ScanShared*>(dynamic);
  const int head = blockIdx.x, n = blockIdx.y, column = blockIdx.z * kColumns, thread = threadIdx.x;
  const int64_t unit = kda_first_unit(sequence_begin(in, n), n, kda_base_segment(in.H));
  Segment seg;
  if (!find_segment(in, unit, units, seg) || seg.whole || seg.n != n) return;
  const int64_t begin = seg.token, end = sequence_begin(in, n + 1);
  const int64_t length = kda_segment_length(end - begin, in.H);
  const int64_t joins = (end - begin + length - 1) / length - 1;
  if (thread == 0) {
    mbarrier_init(&shared.full[0], 1), mbarrier_init(&shared.full[1], 1);
    mbarrier_init_fence();
  }
  for (int i = thread; i < kWidth * kColumns; i += kThreads) {
    const int k = i / kColumns, c = i % kColumns;
    shared.S[i] = in.initial_state
                      ? in.initial_state[((int64_t(n) * in.H + head) * kWidth + k) * kWidth + column + c]
                      : 0.f;
  }
  __syncthreads();
  const auto fetch = [&](int64_t i) {
    uint64_t* bar = &shared.full[i & 1];
    if (thread == 0) mbarrier_arrive_expect(bar, kWidth * (kWidth + kColumns) * 4);
    __syncthreads();
    const float* row = maps + (((unit + i) * in.H + head) * kWidth + (thread & 127)) * 256;
    if (thread < 128)
      bulk_load(shared.A[i & 1] + thread * kRowFloats, row + kWidth, kWidth * 4, bar);
    else
      bulk_load(shared.B[i & 1] + (thread - 128) * kColumns, row + column, kColumns * 4, bar);
  };
  const int row = thread & 63,
            c0 = (thread >> 6) * 4;  // the thread's rows are row and row + 64, its columns c0 ... c0 + 3
  fetch(0);
  for (int64_t i = 0; i < joins; ++i) {
    if (i + 1 < joins) fetch(i + 1);
    mbarrier_wait(&shared.full[i & 1], uint32_t((i >> 1) & 1));
    const float* A = shared.A[i & 1];
    float4 acc[2];
    for (int h = 0; h < 2; ++h)
      acc[h] = *reinterpret_cast<const float4*>(shared.B[i & 1] + (row + 64 * h) * kColumns + c0);
#pragma unroll 8
    for (int j = 0; j < kWidth; j += 4) {
      const float4 a0 = *reinterpret_cast<const float4*>(A + row * kRowFloats + j);
      const float4 a1 = *reinterpret_cast<const float4*>(A + (row + 64) * kRowFloats + j);
      const float x0[4] = {a0.x, a0.y, a0.z, a0.w}, x1[4] = {a1.x, a1.y, a1.z, a1.w};
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float4 s = *reinterpret_cast<const float4*>(shared.S + (j + m) * kColumns + c0);
        acc[0].x = fmaf(x0[m], s.x, acc[0].x), acc[0].y = fmaf(x0[m], s.y, acc[0].y);
        acc[0].z = fmaf(x0[m], s.z, acc[0].z), acc[0].w = fmaf(x0[m], s.w, acc[0].w);
        acc[1].x = fmaf(x1[m], s.x, acc[1].x), acc[1].y = fmaf(x1[m], s.y, acc[1].y);
        acc[1].z = fmaf(x1[m], s.z, acc[1].z), acc[1].w = fmaf(x1[m], s.w, acc[1].w);
      }
    }
    __syncthreads();
    for (int h = 0; h < 2; ++h) {
      *reinterpret_cast<float4*>(shared.S + (row + 64 * h) * kColumns + c0) = acc[h];
      *reinterpret_cast<float4*>(states + (((unit + i + 1) * in.H + head) * kWidth + row + 64 * h) * kWidth +
                                 column + c0) = acc[h];
    }
    __syncthreads();
  }
}

}  // namespace

cudaError_t launch_segment_scan(const KdaInputs& in, const float* maps, float* states, int64_t segments,
                                cudaStream_t stream) {
  const cudaError_t e =
      cudaFuncSetAttribute(scan_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(ScanShared));
  if (e != cudaSuccess) return e;
  scan_kernel<<<dim3(in.H, in.N, kWidth / kColumns), kThreads, sizeof(ScanShared), stream>>>(in, maps, states,
                                                                                             segments);
  return cudaGetLastError();
}

}  // namespace godwit::kernels::cuda::sm90
