// One decode step of a KDA layer in one kernel, one CTA per head and sequence:
//   conv + SiLU:  x = silu(sum_j w_j [c_0 c_1 c_2 x_new]_j)   for q, k, v, rounded to bf16 as the prefill's
//   convolution rounds recurrence:   S' = diag(a) S,  e = v - S'^T k,  S = S' + beta k e^T,  o = S^T q = S'^T
//   q + beta (k . q) e output:       y = o rsqrt(mean o^2 + eps) w_norm sigmoid(gate)
// The state, 64 KiB of fp32 read and written once, is all that costs: its loads are issued first, 64
// registers a thread, and everything else happens while they fly. S'^T k and S'^T q are summed in the same
// pass, so one exchange between warps is enough. Layout: warp w holds rows k = 16 w ... 16 w + 15, lane l the
// columns v = 4 l ... 4 l + 3.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "godwit/kernels/kda_params.h"

namespace godwit::kernels {
namespace {

constexpr int kWidth = 128, kWarps = 8, kRows = kWidth / kWarps, kThreads = 32 * kWarps;
constexpr float kQueryScale = 0.08838834764831845f;  // 128^-1/2

struct StepShared {
  alignas(16) float qkv[3][kWidth];  // after convolution
  alignas(16) float alpha[kWidth];
  alignas(16) float part[2][kWarps][kWidth];  // S'^T k and S'^T q of each warp's rows, not yet normalised
};

__device__ __forceinline__ float sigmoid(float x) {
  return 1.f / (1.f + __expf(-x));
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int m = 16; m > 0; m /= 2) x += __shfl_xor_sync(0xffffffffu, x, m);
  return x;
}

// Channel c of stream i (q, k, v): convolution, SiLU and the new convolution state.
__device__ __forceinline__ float convolve(const KdaStepParams& p, int row, int slot, int head, int i, int c) {
  const int64_t channel = int64_t(head) * kWidth + c, width = int64_t(p.H) * kWidth;
  const __nv_bfloat16 fresh =
      static_cast<const __nv_bfloat16*>(p.qkv)[(int64_t(row) * 3 + i) * width + channel];
  __nv_bfloat16* state =
      static_cast<__nv_bfloat16*>(p.conv_state) + ((int64_t(slot) * 3 + i) * width + channel) * 3;
  const __nv_bfloat16 s0 = state[0], s1 = state[1], s2 = state[2];
  const float4 w = reinterpret_cast<const float4*>(p.conv_weight)[i * width + channel];
  state[0] = s1, state[1] = s2, state[2] = fresh;
  const float y = w.x * __bfloat162float(s0) + w.y * __bfloat162float(s1) + w.z * __bfloat162float(s2) +
                  w.w * __bfloat162float(fresh);
  return __bfloat162float(__float2bfloat16(y * sigmoid(y)));
}

__device__ __forceinline__ float decay(const KdaStepParams& p, int row, int head, int c) {
  const float rate = expf(p.A_log[head]);
  const float x =
      __bfloat162float(static_cast<const __nv_bfloat16*>(p.z)[(int64_t(row) * p.H + head) * kWidth + c]) +
      p.dt_bias[head * kWidth + c];
  if (p.gate_bound < 0.f) return expf(p.gate_bound * sigmoid(rate * x));
  return expf(-rate * (fmaxf(x, 0.f) + log1pf(expf(-fabsf(x)))));
}

// RMS norm and gate of the head's output, by one warp; lane holds columns 4 l ... 4 l + 3.
__device__ __forceinline__ void write_output(const KdaStepParams& p, int64_t at, float4 o, int lane) {
  const float inverse =
      rsqrtf(warp_sum(o.x * o.x + o.y * o.y + o.z * o.z + o.w * o.w) * (1.f / kWidth) + p.norm_eps);
  const float4 w = reinterpret_cast<const float4*>(p.norm_weight)[lane];
  const uint2 raw = reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(p.gate) + at)[lane];
  const float2 g0 = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(raw.x)),
               g1 = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(raw.y));
  const __nv_bfloat162 y0 =
      __floats2bfloat162_rn(o.x * inverse * w.x * sigmoid(g0.x), o.y * inverse * w.y * sigmoid(g0.y));
  const __nv_bfloat162 y1 =
      __floats2bfloat162_rn(o.z * inverse * w.z * sigmoid(g1.x), o.w * inverse * w.w * sigmoid(g1.y));
  reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.y) + at)[lane] =
      make_uint2(reinterpret_cast<const uint32_t&>(y0), reinterpret_cast<const uint32_t&>(y1));
}

__device__ __forceinline__ float4 operator*(float a, float4 b) {
  return make_float4(a * b.x, a * b.y, a * b.z, a * b.w);
}
__device__ __forceinline__ float4 add_scaled(float4 a, float s, float4 b) {
  return make_float4(fmaf(s, b.x, a.x), fmaf(s, b.y, a.y), fmaf(s, b.z, a.z), fmaf(s, b.w, a.w));
}

__global__ void __launch_bounds__(kThreads, 2) step_kernel(const __grid_constant__ KdaStepParams p) {
  __shared__ StepShared shared;
  const int head = blockIdx.x, row = blockIdx.y, thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int slot = p.slot ? p.slot[row] : row;
  const int64_t at = (int64_t(row) * p.H + head) * kWidth;
  if (slot < 0) {
    if (thread < kWidth) static_cast<__nv_bfloat16*>(p.y)[at + thread] = __float2bfloat16(0.f);
    return;
  }
  float4* state = reinterpret_cast<float4*>(p.state + (int64_t(slot) * p.H + head) * kWidth * kWidth) +
                  warp * kRows * 32 + lane;
  float4 s[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) s[i] = __ldcs(state + i * 32);
  shared.qkv[thread >> 7][thread & 127] = convolve(p, row, slot, head, thread >> 7, thread & 127);
  if (thread < kWidth)
    shared.qkv[2][thread] = convolve(p, row, slot, head, 2, thread);
  else
    shared.alpha[thread - kWidth] = decay(p, row, head, thread - kWidth);
  const float beta =
      sigmoid(__bfloat162float(static_cast<const __nv_bfloat16*>(p.b)[int64_t(row) * p.H + head]));
  __syncthreads();
  const float4 q = reinterpret_cast<const float4*>(shared.qkv[0])[lane],
               k = reinterpret_cast<const float4*>(shared.qkv[1])[lane];
  const float rq = kQueryScale * rsqrtf(warp_sum(q.x * q.x + q.y * q.y + q.z * q.z + q.w * q.w) + 1e-6f);
  const float rk = rsqrtf(warp_sum(k.x * k.x + k.y * k.y + k.z * k.z + k.w * k.w) + 1e-6f);
  const float kq = rq * rk * warp_sum(q.x * k.x + q.y * k.y + q.z * k.z + q.w * k.w);
  float4 by_k = make_float4(0.f, 0.f, 0.f, 0.f), by_q = by_k;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int c = warp * kRows + i;
    s[i] = shared.alpha[c] * s[i];
    by_k = add_scaled(by_k, shared.qkv[1][c], s[i]);
    by_q = add_scaled(by_q, shared.qkv[0][c], s[i]);
  }
  reinterpret_cast<float4*>(shared.part[0][warp])[lane] = by_k;
  reinterpret_cast<float4*>(shared.part[1][warp])[lane] = by_q;
  __syncthreads();
  by_k = by_q = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    by_k = add_scaled(by_k, 1.f, reinterpret_cast<const float4*>(shared.part[0][w])[lane]);
    by_q = add_scaled(by_q, 1.f, reinterpret_cast<const float4*>(shared.part[1][w])[lane]);
  }
  const float4 error = add_scaled(reinterpret_cast<const float4*>(shared.qkv[2])[lane], -rk, by_k);
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    __stcs(state + i * 32, add_scaled(s[i], beta * rk * shared.qkv[1][warp * kRows + i], error));
  if (warp == 0) write_output(p, at, add_scaled(rq * by_q, beta * kq, error), lane);
}

}  // namespace

int kda_step(const KdaStepParams& p) {
  if (p.B == 0 || p.H == 0) return cudaSuccess;
  step_kernel<<<dim3(p.H, p.B), kThreads, 0, p.stream>>>(p);
  return cudaGetLastError();
}

}  // namespace godwit::kernels
