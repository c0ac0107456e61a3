// The gated linear unit of kernels/glu.h on the device, with three exponentials and one division:
//   tanh(y) = (1 - a) / (1 + a), a = e^-2y; sigmoid(g) = 1 / (1 + c), c = e^-g
// The exponents are clamped, to 2^26 where tanh is -1 in fp32 and to 2^72 where sigmoid is 2^-72, so that the
// product of the denominators is finite.
#pragma once

#include "godwit/kernels/cuda/sm90/ptx.cuh"
#include "godwit/kernels/glu.h"

namespace godwit::kernels::cuda::sm90 {

inline constexpr float kLog2E = 1.4426950408889634f;

// Constants of a form, once a kernel. A function that the form leaves out is chosen away, not branched
// around, so that the elements of a fragment are computed side by side.
struct GluConstants {
  float gate, up;                    // beta, or 0
  float gate_exponent, up_exponent;  // -2 / (beta ln 2)
  float gate_inverse, up_inverse;
  float scale;  // the product of the betas that are not 0
  explicit __device__ GluConstants(GluForm f)
      : gate(f.beta_gate),
        up(f.beta_up),
        gate_inverse(gate > 0 ? 1.f / gate : 0.f),
        up_inverse(up > 0 ? 1.f / up : 0.f),
        scale((gate > 0 ? gate : 1.f) * (up > 0 ? up : 1.f)) {
    gate_exponent = -2.f * kLog2E * gate_inverse, up_exponent = -2.f * kLog2E * up_inverse;
  }
};

// beta tanh(x / beta) = beta num / den. Near zero 1 - a loses digits; tanh(y) is y there.
struct TanhParts {
  float num;
  float den;
};
__device__ __forceinline__ TanhParts tanh_parts(float x, float exponent, float inverse) {
  const float t = fminf(x * exponent, 26.f);
  const float a = exp2_approx(t), den = 1.f + a, y = x * inverse;
  return {fabsf(y) >= 0.004f ? 1.f - a : y * den, den};  // NaN stays NaN
}
__device__ __forceinline__ float sigmoid_denominator(float g) {
  return 1.f + exp2_approx(fminf(-kLog2E * g, 72.f));
}

__device__ __forceinline__ float glu(float g, float u, const GluConstants& c) {
  const TanhParts tg = tanh_parts(g, c.gate_exponent, c.gate_inverse);
  const TanhParts tu = tanh_parts(u, c.up_exponent, c.up_inverse);
  const float num = (c.gate > 0 ? tg.num : g) * (c.up > 0 ? tu.num : u);
  float den = sigmoid_denominator(g);
  den *= c.gate > 0 ? tg.den : 1.f;
  den *= c.up > 0 ? tu.den : 1.f;
  return c.scale * num * rcp_approx(den);
}

// The value and its two derivatives.
struct GluGradient {
  float value, d_gate, d_up;
};
__device__ __forceinline__ GluGradient glu_gradient(float g, float u, const GluConstants& c) {
  const TanhParts pg = tanh_parts(g, c.gate_exponent, c.gate_inverse);
  const TanhParts pu = tanh_parts(u, c.up_exponent, c.up_inverse);
  const float ds = sigmoid_denominator(g), inverse = rcp_approx(ds * pg.den * pu.den);  // one for all three
  const float s = inverse * (pg.den * pu.den);
  const float tg = pg.num * (inverse * (ds * pu.den)), tu = pu.num * (inverse * (ds * pg.den));
  const float h = c.gate > 0 ? c.gate * tg : g, slope = c.gate > 0 ? 1.f - tg * tg : 1.f;
  const float lin = c.up > 0 ? c.up * tu : u, lin_slope = c.up > 0 ? 1.f - tu * tu : 1.f;
  return {h * s * lin, lin * s * (slope + h * (1.f - s)), h * s * lin_slope};
}

}  // namespace godwit::kernels::cuda::sm90
