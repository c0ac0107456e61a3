// Short convolution and SiLU, forward and backward. Bound by bytes: a thread owns kLanes neighbouring
// channels (16 or 8 bytes) and walks down a strip of tokens with the last inputs in registers. Strips are
// numbered like chunks (kda_heuristic.h), so no sequence boundary is crossed. The rows of the next kAhead
// tokens are on their way while those of the last ones are computed.
//   u_t = sum_j w_j x_(t-3+j)   y_t = u_t s(u_t)   du_t = dy_t s(u_t) (1 + u_t (1 - s(u_t)))
//   dx_t = sum_j w_j du_(t+3-j)   dw_j = sum_t du_t x_(t-3+j)
// The strips' shares of dw are summed in a fixed order by a second kernel.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "godwit/kernels/kda_heuristic.h"
#include "godwit/kernels/kda_params.h"

namespace godwit::kernels::cuda {
namespace {

constexpr int kStrip = 64, kThreads = 128, kAhead = 4;

struct Strip {
  int n;
  int64_t begin, end;   // of the sequence
  int64_t first, last;  // tokens [first, last) of the strip
  bool any;             // the strip exists; an empty sequence has one strip without tokens
};

__device__ __forceinline__ int64_t sequence_begin(const ShortConvParams& p, int n) {
  return p.cu_seqlens ? p.cu_seqlens[n] : p.T / p.N * n;
}

__device__ __forceinline__ Strip find_strip(const ShortConvParams& p, int64_t unit) {
  int low = 0, high = p.N - 1;
  while (low < high) {
    const int middle = (low + high + 1) >> 1;
    if (kda_first_unit(sequence_begin(p, middle), middle, kStrip) <= unit)
      low = middle;
    else
      high = middle - 1;
  }
  Strip s{low, sequence_begin(p, low), sequence_begin(p, low + 1), 0, 0, false};
  s.first = s.begin + (unit - kda_first_unit(s.begin, low, kStrip)) * kStrip;
  s.last = s.first + kStrip < s.end ? s.first + kStrip : s.end;
  s.any = s.first < s.end || s.first == s.begin;
  return s;
}

template <int kLanes>
struct alignas(kLanes * 2) Pack {
  __nv_bfloat16 x[kLanes];
};

template <int kLanes>
__device__ __forceinline__ void unpack(float (&to)[kLanes], const Pack<kLanes>& p) {
#pragma unroll
  for (int i = 0; i < kLanes; ++i) to[i] = __bfloat162float(p.x[i]);
}
template <int kLanes>
__device__ __forceinline__ Pack<kLanes> load(const void* rows, int64_t at) {
  return *reinterpret_cast<const Pack<kLanes>*>(static_cast<const __nv_bfloat16*>(rows) + at);
}
// kAhead rows from token t on, as far as they lie before `end`.
template <int kLanes>
__device__ __forceinline__ void fetch(Pack<kLanes> (&to)[kAhead], const void* rows, int64_t t, int64_t end,
                                      int64_t C, int64_t channel) {
#pragma unroll
  for (int j = 0; j < kAhead; ++j)
    if (t + j < end) to[j] = load<kLanes>(rows, (t + j) * C + channel);
}
__device__ __forceinline__ float sigmoid(float u) {
  return __fdividef(1.f, 1.f + __expf(-u));
}
template <int kLanes>
__device__ __forceinline__ void store(const float (&from)[kLanes], void* rows, int64_t at) {
  Pack<kLanes> p;
#pragma unroll
  for (int i = 0; i < kLanes; ++i) p.x[i] = __float2bfloat16(from[i]);
  *reinterpret_cast<Pack<kLanes>*>(static_cast<__nv_bfloat16*>(rows) + at) = p;
}

// The input at token t of the strip's sequence, which may lie up to 3 before it.
template <int kLanes>
__device__ __forceinline__ void input(float (&to)[kLanes], const ShortConvParams& p, const Strip& s,
                                      int64_t t, int64_t channel) {
  if (t >= s.begin) return unpack(to, load<kLanes>(p.x, t * p.C + channel));
#pragma unroll
  for (int i = 0; i < kLanes; ++i)
    to[i] = p.initial_state ? __bfloat162float(static_cast<const __nv_bfloat16*>(
                                  p.initial_state)[(s.n * p.C + channel + i) * 3 + 3 + t - s.begin])
                            : 0.f;
}

template <int kLanes>
__device__ __forceinline__ void weights(float (&w)[4][kLanes], const ShortConvParams& p, int64_t channel) {
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    const float4 x = reinterpret_cast<const float4*>(p.weight)[channel + i];
    w[0][i] = x.x, w[1][i] = x.y, w[2][i] = x.z, w[3][i] = x.w;
  }
}

__global__ void __launch_bounds__(kThreads, 4) forward_kernel(const __grid_constant__ ShortConvParams p) {
  constexpr int kLanes = 8;
  const int64_t channel = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kLanes;
  const Strip s = find_strip(p, blockIdx.y);
  if (channel >= p.C || !s.any) return;
  float w[4][kLanes], x[4][kLanes], y[kLanes];
  weights(w, p, channel);
#pragma unroll
  for (int j = 0; j < 3; ++j) input(x[j], p, s, s.first - 3 + j, channel);
  Pack<kLanes> rows[kAhead], next[kAhead] = {};
  fetch(next, p.x, s.first, s.last, p.C, channel);
  for (int64_t first = s.first; first < s.last; first += kAhead) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) rows[j] = next[j];
    fetch(next, p.x, first + kAhead, s.last, p.C, channel);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (first + j >= s.last) break;
      unpack(x[3], rows[j]);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        const float u = w[0][i] * x[0][i] + w[1][i] * x[1][i] + w[2][i] * x[2][i] + w[3][i] * x[3][i];
        y[i] = u * sigmoid(u);
        x[0][i] = x[1][i], x[1][i] = x[2][i], x[2][i] = x[3][i];
      }
      store(y, p.y, (first + j) * p.C + channel);
    }
  }
  if (s.last == s.end && p.final_state) {
#pragma unroll
    for (int j = 0; j < 3; ++j)
#pragma unroll
      for (int i = 0; i < kLanes; ++i)
        static_cast<__nv_bfloat16*>(p.final_state)[(s.n * p.C + channel + i) * 3 + j] =
            __float2bfloat16(x[j][i]);
  }
}

// d of the input at token t that arrives through the final state, which holds the last three inputs.
__device__ __forceinline__ float from_final(const ShortConvParams& p, const Strip& s, int64_t t,
                                            int64_t channel) {
  const int64_t j = t - (s.end - 3);
  return p.d_final_state && j >= 0 ? __bfloat162float(static_cast<const __nv_bfloat16*>(
                                         p.d_final_state)[(s.n * p.C + channel) * 3 + j])
                                   : 0.f;
}

__global__ void __launch_bounds__(kThreads, 4) backward_kernel(const __grid_constant__ ShortConvParams p) {
  constexpr int kLanes = 4;
  const int64_t channel = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kLanes;
  if (channel >= p.C) return;
  float4* share = static_cast<float4*>(p.workspace) + blockIdx.y * p.C + channel;
  const Strip s = find_strip(p, blockIdx.y);
  float w[4][kLanes], x[4][kLanes], du[4][kLanes] = {}, dw[4][kLanes] = {}, dx[kLanes];
  weights(w, p, channel);
  if (s.any) {
    // x[j] is the input at t - 3 + j, du[j] belongs to token t - 3 + j. A strip's dx need du up to three
    // tokens further.
#pragma unroll
    for (int j = 0; j < 3; ++j) input(x[j], p, s, s.first - 3 + j, channel);
    const int64_t stop = s.last + 3, read = stop < s.end ? stop : s.end;
    Pack<kLanes> xs[kAhead], dys[kAhead], next_x[kAhead] = {}, next_dy[kAhead] = {};
    fetch(next_x, p.x, s.first, read, p.C, channel), fetch(next_dy, p.dy, s.first, read, p.C, channel);
    for (int64_t first = s.first; first < stop; first += kAhead) {
#pragma unroll
      for (int j = 0; j < kAhead; ++j) xs[j] = next_x[j], dys[j] = next_dy[j];
      fetch(next_x, p.x, first + kAhead, read, p.C, channel);
      fetch(next_dy, p.dy, first + kAhead, read, p.C, channel);
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const int64_t t = first + k;
        if (t >= stop) break;
        if (t < s.end) {
          float dy[kLanes];
          unpack(x[3], xs[k]), unpack(dy, dys[k]);
#pragma unroll
          for (int i = 0; i < kLanes; ++i) {
            const float u = w[0][i] * x[0][i] + w[1][i] * x[1][i] + w[2][i] * x[2][i] + w[3][i] * x[3][i],
                        sig = sigmoid(u);
            du[3][i] = dy[i] * sig * (1.f + u * (1.f - sig));
            if (t < s.last) {
#pragma unroll
              for (int j = 0; j < 4; ++j) dw[j][i] += du[3][i] * x[j][i];
            }
          }
        } else {
#pragma unroll
          for (int i = 0; i < kLanes; ++i) du[3][i] = 0.f;
        }
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
          dx[i] = w[3][i] * du[0][i] + w[2][i] * du[1][i] + w[1][i] * du[2][i] + w[0][i] * du[3][i] +
                  from_final(p, s, t - 3, channel + i);
          x[0][i] = x[1][i], x[1][i] = x[2][i], x[2][i] = x[3][i];
          du[0][i] = du[1][i], du[1][i] = du[2][i], du[2][i] = du[3][i];
        }
        if (t - 3 >= s.first) {
          store(dx, p.dx, (t - 3) * p.C + channel);
        } else if (s.first == s.begin && p.d_initial_state) {  // inputs before the sequence
#pragma unroll
          for (int i = 0; i < kLanes; ++i)
            static_cast<__nv_bfloat16*>(p.d_initial_state)[(s.n * p.C + channel + i) * 3 + t - s.first] =
                __float2bfloat16(dx[i]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kLanes; ++i) share[i] = make_float4(dw[0][i], dw[1][i], dw[2][i], dw[3][i]);
}

__global__ void __launch_bounds__(kThreads)
    reduce_kernel(const float4* shares, float4* dweight, int64_t strips, int64_t C) {
  const int64_t c = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (c >= C) return;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
  for (int64_t s = 0; s < strips; ++s) {
    const float4 x = shares[s * C + c];
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  dweight[c] = sum;
}

unsigned blocks(int64_t n, int64_t per) {
  return unsigned((n + per - 1) / per);
}

}  // namespace

int short_conv_fwd(const ShortConvParams& p) {
  if (p.C % 8 != 0) return cudaErrorInvalidValue;
  if (p.N == 0 || p.C == 0) return cudaSuccess;
  forward_kernel<<<dim3(blocks(p.C, kThreads * 8), unsigned(kda_unit_count(p.T, p.N, kStrip))), kThreads, 0,
                   p.stream>>>(p);
  return cudaGetLastError();
}

size_t short_conv_bwd_workspace_bytes(const ShortConvParams& p) {
  return size_t(kda_unit_count(p.T, p.N, kStrip)) * p.C * 16;
}

int short_conv_bwd(const ShortConvParams& p) {
  if (p.C % 8 != 0) return cudaErrorInvalidValue;
  if (p.N == 0 || p.C == 0) return cudaSuccess;
  const int64_t strips = kda_unit_count(p.T, p.N, kStrip);
  backward_kernel<<<dim3(blocks(p.C, kThreads * 4), unsigned(strips)), kThreads, 0, p.stream>>>(p);
  reduce_kernel<<<blocks(p.C, kThreads), kThreads, 0, p.stream>>>(
      static_cast<const float4*>(p.workspace), reinterpret_cast<float4*>(p.dweight), strips, p.C);
  return cudaGetLastError();
}

}  // namespace godwit::kernels::cuda
