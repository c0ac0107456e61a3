// Gated linear unit f(g, u) = act(g) lin(u) (kernels/glu.h), elementwise. With b = e^(-2 |g| / beta) etc. all
// three factors are quotients of terms in (0, 2], so one reciprocal serves them: four special-function
// instructions a value, which keeps the kernel under the memory's rate. Near 0, where 1 - b cancels, tanh is
// its series.
#include <algorithm>

#include "godwit/kernels/cuda/sm90/rows.cuh"

namespace godwit::kernels::cuda {
namespace {

using namespace sm90;

constexpr int kThreads = 256;
constexpr float kLog2e = 1.44269504f;

// tanh(x / beta) as top / bottom, bottom in [1, 2].
struct Quotient {
  float top, bottom;
};
__device__ __forceinline__ Quotient tanh_quotient(float x, float inverse_beta) {
  const float y = fabsf(x) * inverse_beta, e = exp2_approx(-2.f * kLog2e * y);
  // y (1 - y^2 / 3 + 2 y^4 / 15 - 17 y^6 / 315) to 1e-7 below 1/4; times (1 + e) to share the bottom.
  const float y2 = y * y;
  const float series = y * fmaf(y2, fmaf(y2, fmaf(y2, -17.f / 315.f, 2.f / 15.f), -1.f / 3.f), 1.f);
  const float top = y < 0.25f ? series * (1.f + e) : 1.f - e;
  return {copysignf(top, x), 1.f + e};
}
__device__ __forceinline__ Quotient sigmoid_quotient(float x) {
  const float e = exp2_approx(-kLog2e * fabsf(x));
  return {x >= 0.f ? 1.f : e, 1.f + e};
}

struct Form {
  float beta_gate, beta_up, inverse_gate, inverse_up;
};

template <bool kGate, bool kUp>
__device__ __forceinline__ float forward(float g, float u, const Form& f) {
  const Quotient s = sigmoid_quotient(g);
  float top = s.top, bottom = s.bottom;
  if constexpr (kGate) {
    const Quotient t = tanh_quotient(g, f.inverse_gate);
    top *= f.beta_gate * t.top, bottom *= t.bottom;
  } else {
    top *= g;
  }
  if constexpr (kUp) {
    const Quotient t = tanh_quotient(u, f.inverse_up);
    top *= f.beta_up * t.top, bottom *= t.bottom;
  } else {
    top *= u;
  }
  return __fdividef(top, bottom);
}

// Gradients of g and u; a' of act is (1 - t^2) s + beta t s (1 - s), or s + g s (1 - s).
template <bool kGate, bool kUp>
__device__ __forceinline__ float2 backward(float d, float g, float u, const Form& f) {
  const Quotient q = sigmoid_quotient(g);
  const float s = __fdividef(q.top, q.bottom);
  float act, slope, lin = u, lin_slope = 1.f;
  if constexpr (kGate) {
    const Quotient r = tanh_quotient(g, f.inverse_gate);
    const float t = __fdividef(r.top, r.bottom);
    act = f.beta_gate * t * s;
    slope = fmaf(-t * t, s, s) + act * (1.f - s);
  } else {
    act = g * s;
    slope = s + act * (1.f - s);
  }
  if constexpr (kUp) {
    const Quotient r = tanh_quotient(u, f.inverse_up);
    const float t = __fdividef(r.top, r.bottom);
    lin = f.beta_up * t, lin_slope = 1.f - t * t;
  }
  return make_float2(d * slope * lin, d * act * lin_slope);
}

template <bool kGate, bool kUp, bool kBackward>
__global__ void __launch_bounds__(kThreads) glu_kernel(const __grid_constant__ GluParams p, Form f) {
  const int64_t units = p.n / kVector, step = int64_t(gridDim.x) * kThreads;
  for (int64_t unit = int64_t(blockIdx.x) * kThreads + threadIdx.x; unit < units; unit += step) {
    const Eight g = unpack(load_unit(p.g, unit)), u = unpack(load_unit(p.u, unit));
    if constexpr (kBackward) {
      const Eight d = unpack(load_unit(p.d_out, unit));
      Eight dg, du;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float2 grad = backward<kGate, kUp>(d.x[i], g.x[i], u.x[i], f);
        dg.x[i] = grad.x, du.x[i] = grad.y;
      }
      store_unit(p.d_g, unit, dg);
      store_unit(p.d_u, unit, du);
    } else {
      Eight out;
#pragma unroll
      for (int i = 0; i < kVector; ++i) out.x[i] = forward<kGate, kUp>(g.x[i], u.x[i], f);
      store_unit(p.out, unit, out);
    }
  }
}

template <bool kBackward>
int launch(const GluParams& p) {
  if (p.n == 0) return cudaSuccess;
  if (p.n % kVector != 0) return cudaErrorInvalidValue;
  const Form f{p.beta_gate, p.beta_up, p.beta_gate > 0 ? 1.f / p.beta_gate : 0.f,
               p.beta_up > 0 ? 1.f / p.beta_up : 0.f};
  const bool gate = p.beta_gate > 0, up = p.beta_up > 0;
  const auto kernel = gate ? (up ? glu_kernel<true, true, kBackward> : glu_kernel<true, false, kBackward>)
                           : (up ? glu_kernel<false, true, kBackward> : glu_kernel<false, false, kBackward>);
  const int64_t blocks = (p.n / kVector + kThreads - 1) / kThreads;
  kernel<<<unsigned(std::min<int64_t>(blocks, 1 << 20)), kThreads, 0, p.stream>>>(p, f);
  return cudaGetLastError();
}

}  // namespace

int glu_fwd(const GluParams& p) {
  return launch<false>(p);
}
int glu_bwd(const GluParams& p) {
  return launch<true>(p);
}

}  // namespace godwit::kernels::cuda
