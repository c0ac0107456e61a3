// Vector form of the gated linear unit, shared by glu and moe_experts. One division for the whole function:
// tanh and sigmoid are kept as numerator / denominator until the end.
#pragma once

#include "godwit/kernels/cpu/simd.h"
#include "godwit/kernels/glu.h"

namespace godwit::kernels::GODWIT_ISA {

// The form's constants, spread once.
struct GluConstants {
  explicit GluConstants(GluForm form)
      : bound_gate(form.beta_gate > 0),
        bound_up(form.beta_up > 0),
        beta_gate(form.beta_gate),
        beta_up(form.beta_up),
        per_gate(bound_gate ? 1 / form.beta_gate : 0),
        per_up(bound_up ? 1 / form.beta_up : 0) {}
  bool bound_gate, bound_up;
  float beta_gate, beta_up, per_gate, per_up;
};

// 1 / sigmoid(g). Bounded, so that a product of denominators stays finite; sigmoid(-60) = 9e-27 stands for
// all below.
static inline Vec sigmoid_denominator(Vec g) {
  return splat(1.0f) + vexp(-vmax(splat(-60.0f), g));
}

// act = act_num / act_den, lin = lin_num / lin_den; sigmoid(g) = 1 / sig_den.
struct GluParts {
  Ratio act;  // without the sigmoid
  Ratio lin;
  Vec sig_den;
};

static inline GluParts glu_parts(const GluConstants& c, Vec g, Vec u) {
  GluParts p;
  p.act = {g, splat(1.0f)};
  if (c.bound_gate) {
    p.act = tanh_ratio(g * splat(c.per_gate));
    p.act.num = p.act.num * splat(c.beta_gate);
  }
  p.lin = {u, splat(1.0f)};
  if (c.bound_up) {
    p.lin = tanh_ratio(u * splat(c.per_up));
    p.lin.num = p.lin.num * splat(c.beta_up);
  }
  p.sig_den = sigmoid_denominator(g);
  return p;
}

static inline Vec glu_value(const GluConstants& c, Vec g, Vec u) {
  const GluParts p = glu_parts(c, g, u);
  return (p.act.num * p.lin.num) / (p.act.den * p.lin.den * p.sig_den);
}

// f and its derivatives by g and u.
struct GluGradient {
  Vec value;
  Vec by_g;
  Vec by_u;
};

// With s = sigmoid(g), a = beta tanh(g / beta): d act = s (1 - t^2 + a (1 - s)); without bound a = g, t = 0.
static inline GluGradient glu_gradient(const GluConstants& c, Vec g, Vec u) {
  const GluParts p = glu_parts(c, g, u);
  const Vec one = splat(1.0f);
  const Vec tanhs = p.act.den * p.lin.den;
  const Vec inverse = one / (tanhs * p.sig_den);
  const Vec sigmoid = inverse * tanhs;
  const Vec by_sig = inverse * p.sig_den;
  const Vec a = p.act.num * (by_sig * p.lin.den);
  const Vec lin = p.lin.num * (by_sig * p.act.den);
  Vec slope_a = one, slope_lin = one;
  if (c.bound_gate) {
    const Vec t = a * splat(c.per_gate);
    slope_a = one - t * t;
  }
  if (c.bound_up) {
    const Vec t = lin * splat(c.per_up);
    slope_lin = one - t * t;
  }
  const Vec act = a * sigmoid;
  return {
      .value = act * lin, .by_g = sigmoid * (slope_a + a * (one - sigmoid)) * lin, .by_u = act * slope_lin};
}

}  // namespace godwit::kernels::GODWIT_ISA
