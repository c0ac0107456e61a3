// Decode of a KDA layer in one kernel, one CTA per head and sequence, token by token (kda_params.h):
//   conv + SiLU:  x = silu(sum_j w_j [c_0 c_1 c_2 x_new]_j)   for q, k, v, rounded to bf16 as the prefill's
//   recurrence:   S' = diag(a) S,  e = v - S'^T k,  S = S' + beta k e^T,  o = S^T q = S'^T q + beta (k . q) e
//   output:       y = o rsqrt(mean o^2 + eps) w_norm sigmoid(gate)
// The state, 64 KiB of fp32 (or half of that in bf16) read and written once, is all that costs: its loads are
// issued first, 64 registers a thread, and everything else happens while they fly. S'^T k and S'^T q are
// summed in the same pass, so one exchange between warps is enough. Layout: warp w holds rows k = 16 w ... 16
// w + 15, lane l the columns v = 4 l ... 4 l + 3.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "godwit/kernels/kda_params.h"

namespace godwit::kernels::cuda {
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

// A channel of stream i (q, k, v) and the last inputs of its convolution.
struct Channel {
  int i, c;  // c = head * 128 + channel of the head
  __nv_bfloat16 last[3];
};

__device__ __forceinline__ __nv_bfloat16* conv_state(const KdaStepParams& p, const Channel& x, int slot) {
  return static_cast<__nv_bfloat16*>(p.conv_state[x.i]) + slot * p.conv_stride + int64_t(x.c) * 3;
}
__device__ __forceinline__ Channel open_channel(const KdaStepParams& p, int slot, int i, int c) {
  Channel x{i, c, {}};
  if (!p.conv_weight[i]) return x;
  for (int j = 0; j < 3; ++j) x.last[j] = conv_state(p, x, slot)[j];
  return x;
}
__device__ __forceinline__ void keep_channel(const KdaStepParams& p, const Channel& x, int slot) {
  if (!p.conv_weight[x.i]) return;
  for (int j = 0; j < 3; ++j) conv_state(p, x, slot)[j] = x.last[j];
}

// The channel's value at a token, after convolution and SiLU if there is one.
__device__ __forceinline__ float advance(const KdaStepParams& p, Channel& x, int64_t token) {
  const __nv_bfloat16 fresh = static_cast<const __nv_bfloat16*>(p.x[x.i])[token * p.x_stride + x.c];
  if (!p.conv_weight[x.i]) return __bfloat162float(fresh);
  const float4 w = reinterpret_cast<const float4*>(p.conv_weight[x.i])[x.c];
  const float y = w.x * __bfloat162float(x.last[0]) + w.y * __bfloat162float(x.last[1]) +
                  w.z * __bfloat162float(x.last[2]) + w.w * __bfloat162float(fresh);
  x.last[0] = x.last[1], x.last[1] = x.last[2], x.last[2] = fresh;
  return __bfloat162float(__float2bfloat16(y * sigmoid(y)));
}

__device__ __forceinline__ float decay(const KdaStepParams& p, int64_t token, int head, int c) {
  const float rate = expf(p.A_log[head]);
  const float x =
      __bfloat162float(static_cast<const __nv_bfloat16*>(p.z)[(token * p.H + head) * kWidth + c]) +
      p.dt_bias[head * kWidth + c];
  if (p.gate_bound < 0.f) return expf(p.gate_bound * sigmoid(rate * x));
  return expf(-rate * (fmaxf(x, 0.f) + log1pf(expf(-fabsf(x)))));
}

__device__ __forceinline__ float beta_of(const KdaStepParams& p, int64_t token, int head) {
  const int64_t at = token * p.H + head;
  return sigmoid(p.b_fp32 ? static_cast<const float*>(p.b)[at]
                          : __bfloat162float(static_cast<const __nv_bfloat16*>(p.b)[at]));
}

// The head's output, with RMS norm and gate if wanted, by one warp; lane holds columns 4 l ... 4 l + 3.
__device__ __forceinline__ void write_output(const KdaStepParams& p, int64_t at, float4 o, int lane) {
  if (p.norm_weight) {
    const float inverse =
        rsqrtf(warp_sum(o.x * o.x + o.y * o.y + o.z * o.z + o.w * o.w) * (1.f / kWidth) + p.norm_eps);
    const float4 w = reinterpret_cast<const float4*>(p.norm_weight)[lane];
    const uint2 raw = reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(p.gate) + at)[lane];
    const float2 g0 = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(raw.x)),
                 g1 = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(raw.y));
    o.x *= inverse * w.x * sigmoid(g0.x), o.y *= inverse * w.y * sigmoid(g0.y);
    o.z *= inverse * w.z * sigmoid(g1.x), o.w *= inverse * w.w * sigmoid(g1.y);
  }
  const __nv_bfloat162 y0 = __floats2bfloat162_rn(o.x, o.y), y1 = __floats2bfloat162_rn(o.z, o.w);
  reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.y) + at)[lane] =
      make_uint2(reinterpret_cast<const uint32_t&>(y0), reinterpret_cast<const uint32_t&>(y1));
}

__device__ __forceinline__ float4 operator*(float a, float4 b) {
  return make_float4(a * b.x, a * b.y, a * b.z, a * b.w);
}
__device__ __forceinline__ float4 add_scaled(float4 a, float s, float4 b) {
  return make_float4(fmaf(s, b.x, a.x), fmaf(s, b.y, a.y), fmaf(s, b.z, a.z), fmaf(s, b.w, a.w));
}

// One token: advances the thread's part of the state; warp 0 writes the output. Two barriers inside.
__device__ __forceinline__ void step(const KdaStepParams& p, StepShared& shared, float4 (&s)[kRows],
                                     int64_t token, int head, int warp, int lane) {
  const float beta = beta_of(p, token, head);
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
  for (int i = 0; i < kRows; ++i) s[i] = add_scaled(s[i], beta * rk * shared.qkv[1][warp * kRows + i], error);
  if (warp == 0)
    write_output(p, (token * p.H + head) * kWidth, add_scaled(rq * by_q, beta * kq, error), lane);
}

// Four values of a state row, fp32 or bf16.
template <bool kHalf>
__device__ __forceinline__ float4 load_four(const void* state, int64_t at) {
  if constexpr (!kHalf) return __ldcs(static_cast<const float4*>(state) + at);
  const uint2 raw = __ldcs(static_cast<const uint2*>(state) + at);
  const float2 a = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(raw.x)),
               b = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(raw.y));
  return make_float4(a.x, a.y, b.x, b.y);
}
template <bool kHalf>
__device__ __forceinline__ void store_four(void* state, int64_t at, float4 x) {
  if constexpr (!kHalf) {
    __stcs(static_cast<float4*>(state) + at, x);
  } else {
    const __nv_bfloat162 a = __floats2bfloat162_rn(x.x, x.y), b = __floats2bfloat162_rn(x.z, x.w);
    __stcs(static_cast<uint2*>(state) + at,
           make_uint2(reinterpret_cast<const uint32_t&>(a), reinterpret_cast<const uint32_t&>(b)));
  }
}

template <bool kMany, bool kHalf>
__global__ void __launch_bounds__(kThreads, 2) step_kernel(const __grid_constant__ KdaStepParams p) {
  __shared__ StepShared shared;
  const int head = blockIdx.x, row = blockIdx.y, thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int tokens = kMany ? p.tokens : 1;
  const int slot = p.slot ? p.slot[row] : row, keep = p.keep ? p.keep[row] : tokens;
  const int64_t first = int64_t(row) * tokens;
  if (slot < 0) {
    for (int m = 0; m < tokens && thread < kWidth; ++m)
      static_cast<__nv_bfloat16*>(p.y)[((first + m) * p.H + head) * kWidth + thread] = __float2bfloat16(0.f);
    return;
  }
  constexpr int64_t kState = kWidth * kWidth;
  const int64_t stride = p.state_stride ? p.state_stride : p.H * kState;
  const int64_t state = (slot * stride + head * kState) / 4 + warp * kRows * 32 + lane;  // in fours
  float4 s[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) s[i] = load_four<kHalf>(p.state, state + i * 32);
  // Thread t has channel t % 128 of q (t < 128) or k, and besides of v (t < 128) or of the decay.
  const int c = thread & (kWidth - 1);
  Channel one = open_channel(p, slot, thread >> 7, head * kWidth + c), two;
  if (thread < kWidth) two = open_channel(p, slot, 2, head * kWidth + c);
  for (int m = 0; m < tokens; ++m) {
    if (m > 0) __syncthreads();  // the last token's reads of `shared`
    shared.qkv[thread >> 7][c] = advance(p, one, first + m);
    if (thread < kWidth)
      shared.qkv[2][c] = advance(p, two, first + m);
    else
      shared.alpha[c] = decay(p, first + m, head, c);
    step(p, shared, s, first + m, head, warp, lane);
    if (m + 1 != keep) continue;
#pragma unroll
    for (int i = 0; i < kRows; ++i) store_four<kHalf>(p.state, state + i * 32, s[i]);
    keep_channel(p, one, slot);
    if (thread < kWidth) keep_channel(p, two, slot);
  }
}

}  // namespace

int kda_step(const KdaStepParams& p) {
  if (p.B == 0 || p.H == 0 || p.tokens == 0) return cudaSuccess;
  const auto one = p.state_bf16 ? step_kernel<false, true> : step_kernel<false, false>;
  const auto many = p.state_bf16 ? step_kernel<true, true> : step_kernel<true, false>;
  const auto kernel = p.tokens == 1 ? one : many;
  kernel<<<dim3(p.H, p.B), kThreads, 0, p.stream>>>(p);
  return cudaGetLastError();
}

}  // namespace godwit::kernels::cuda
