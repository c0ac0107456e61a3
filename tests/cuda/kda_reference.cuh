// The KDA recurrence and its gradient token by token in fp64 on the GPU: the oracle of kda_gpu_test.cu. Slow
// and simple.
//   S' = diag(a_t) S_(t-1),  e = v_t - S'^T k_t,  S_t = S' + beta_t k_t e^T,  o_t = S_t^T q_t
// One block of 128 threads per sequence and head; thread v owns state column v.
#pragma once

#include <cuda_bf16.h>

#include "godwit/kernels/kda_params.h"

namespace reference {

using godwit::kernels::cuda::KdaInputs;

struct Outputs {
  double* o;            // [T, H, 128]
  double* final_state;  // [N, H, 128, 128]
  double* history;      // [T, H, 128, 128] S_(t-1) of every token, or nullptr
};

__device__ inline double block_sum(double x, double* shared) {
  const int i = threadIdx.x;
  __syncthreads();
  shared[i] = x;
  __syncthreads();
  for (int half = 64; half > 0; half /= 2) {
    if (i < half) shared[i] += shared[i + half];
    __syncthreads();
  }
  return shared[0];
}

__device__ inline double as_double(const void* p, int64_t i) {
  return double(__bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]));
}

struct Token {
  double k, q, alpha, g, slope;  // of channel threadIdx.x; slope = dg / dz
  double inverse_k, inverse_q, beta;
};

__device__ inline Token load_token(const KdaInputs& in, int64_t t, int h, double* shared) {
  const int i = threadIdx.x;
  const int64_t at = (t * in.H + h) * 128 + i;
  Token x;
  x.k = as_double(in.k, at), x.q = as_double(in.q, at);
  x.inverse_k = 1.0 / sqrt(block_sum(x.k * x.k, shared) + 1e-6);
  x.inverse_q = 1.0 / sqrt(block_sum(x.q * x.q, shared) + 1e-6);
  x.k *= x.inverse_k, x.q *= x.inverse_q;
  const double logit = as_double(in.z, at) + double(in.dt_bias[h * 128 + i]), rate = exp(double(in.A_log[h]));
  if (in.gate_bound < 0) {
    const double s = 1.0 / (1.0 + exp(-rate * logit));
    x.g = double(in.gate_bound) * s, x.slope = double(in.gate_bound) * s * (1 - s) * rate;
  } else {
    x.g = -rate * (logit > 0 ? logit + log1p(exp(-logit)) : log1p(exp(logit)));
    x.slope = -rate / (1.0 + exp(-logit));
  }
  x.alpha = exp(x.g);
  x.beta = 1.0 / (1.0 + exp(-(in.b_fp32 ? double(static_cast<const float*>(in.b)[t * in.H + h])
                                        : as_double(in.b, t * in.H + h))));
  return x;
}

__global__ void forward(KdaInputs in, Outputs out) {
  __shared__ double shared[128], k[128], q[128], alpha[128];
  const int n = blockIdx.x, h = blockIdx.y, v = threadIdx.x;
  double S[128];
  const int64_t state = (int64_t(n) * in.H + h) * 128 * 128 + v;
  for (int i = 0; i < 128; ++i) S[i] = in.initial_state ? in.initial_state[state + i * 128] : 0.0;
  for (int64_t t = in.cu_seqlens[n]; t < in.cu_seqlens[n + 1]; ++t) {
    const Token x = load_token(in, t, h, shared);
    k[v] = x.k, q[v] = x.q, alpha[v] = x.alpha;
    __syncthreads();
    double e = as_double(in.v, (t * in.H + h) * 128 + v);
    for (int i = 0; i < 128; ++i) {
      if (out.history) out.history[((t * in.H + h) * 128 + i) * 128 + v] = S[i];
      S[i] *= alpha[i];
      e -= S[i] * k[i];
    }
    double o = 0;
    for (int i = 0; i < 128; ++i) {
      S[i] += x.beta * k[i] * e;
      o += S[i] * q[i];
    }
    out.o[(t * in.H + h) * 128 + v] = o / sqrt(128.0);
    __syncthreads();
  }
  for (int i = 0; i < 128; ++i) out.final_state[state + i * 128] = S[i];
}

struct Gradients {
  double *dq, *dk, *dv, *dz, *db, *dA_log, *d_dt_bias,
      *d_initial_state;  // dA_log, d_dt_bias zeroed by the caller
};

__global__ void backward(KdaInputs in, const void* d_o, const float* d_final, const double* history,
                         Gradients grad) {
  __shared__ double shared[128], k[128], q[128], alpha[128], dq[128], dk[128], dalpha[128];
  const int n = blockIdx.x, h = blockIdx.y, v = threadIdx.x;
  const int64_t state = (int64_t(n) * in.H + h) * 128 * 128 + v;
  double dS[128];
  for (int i = 0; i < 128; ++i) dS[i] = d_final ? d_final[state + i * 128] : 0.0;
  for (int64_t t = in.cu_seqlens[n + 1] - 1; t >= in.cu_seqlens[n]; --t) {
    const int64_t at = (t * in.H + h) * 128 + v;
    const Token x = load_token(in, t, h, shared);
    k[v] = x.k, q[v] = x.q / sqrt(128.0), alpha[v] = x.alpha, dq[v] = dk[v] = dalpha[v] = 0;
    __syncthreads();
    const double* before = history + (t * in.H + h) * 128 * 128 + v;
    double e = as_double(in.v, at), d = as_double(d_o, at), de = 0, kdS = 0;
    for (int i = 0; i < 128; ++i) e -= before[i * 128] * alpha[i] * k[i];
    for (int i = 0; i < 128; ++i) {
      dS[i] += q[i] * d;
      kdS += dS[i] * k[i];
    }
    de = x.beta * kdS;
    const double dbeta = block_sum(kdS * e, shared);
    for (int i = 0; i < 128; ++i) {
      const double old = before[i * 128], decayed = old * alpha[i], now = decayed + x.beta * k[i] * e;
      double a = now * d, b = dS[i] * x.beta * e - decayed * de;
      dS[i] -= k[i] * de;
      double c = dS[i] * old;
      for (int m = 16; m > 0; m /= 2) {
        a += __shfl_xor_sync(~0u, a, m), b += __shfl_xor_sync(~0u, b, m), c += __shfl_xor_sync(~0u, c, m);
      }
      if (v % 32 == 0) atomicAdd(dq + i, a), atomicAdd(dk + i, b), atomicAdd(dalpha + i, c);
      dS[i] *= alpha[i];
    }
    __syncthreads();
    const double gq = dq[v] / sqrt(128.0), gk = dk[v];
    const double qg = block_sum(gq * x.q, shared), kg = block_sum(gk * x.k, shared);
    grad.dq[at] = x.inverse_q * (gq - x.q * qg);
    grad.dk[at] = x.inverse_k * (gk - x.k * kg);
    grad.dv[at] = de;
    const double dz = dalpha[v] * x.alpha * x.slope;
    grad.dz[at] = dz;
    atomicAdd(grad.d_dt_bias + h * 128 + v, dz);
    const double logit = as_double(in.z, at) + double(in.dt_bias[h * 128 + v]);
    // d g / d A_log: bounded gates depend on e^A logit, the unbounded ones are proportional to e^A.
    const double dA = block_sum(in.gate_bound < 0 ? dz * logit : dalpha[v] * x.alpha * x.g, shared);
    if (v == 0) {
      atomicAdd(grad.dA_log + h, dA);
      grad.db[t * in.H + h] = dbeta * x.beta * (1 - x.beta);
    }
    __syncthreads();
  }
  for (int i = 0; i < 128; ++i) grad.d_initial_state[state + i * 128] = dS[i];
}

}  // namespace reference
