#include "godwit/kernels/cpu/glu_isa.h"
#include "godwit/kernels/cpu/glu_math.h"
#include "godwit/kernels/cpu/lanes.h"

namespace godwit::kernels::GODWIT_ISA {
void glu_fwd_range(int64_t n, const float* g, const float* u, GluForm form, float* out) {
  const GluConstants c(form);
  for_vectors(n, [&](int64_t i, auto lanes) {
    store_lanes(out + i, glu_value(c, load_lanes(g + i, lanes), load_lanes(u + i, lanes)), lanes);
  });
}

void glu_bwd_range(int64_t n, const float* d_out, const float* g, const float* u, GluForm form, float* d_g,
                   float* d_u) {
  const GluConstants c(form);
  for_vectors(n, [&](int64_t i, auto lanes) {
    const GluGradient f = glu_gradient(c, load_lanes(g + i, lanes), load_lanes(u + i, lanes));
    const Vec d = load_lanes(d_out + i, lanes);
    store_lanes(d_g + i, d * f.by_g, lanes);
    store_lanes(d_u + i, d * f.by_u, lanes);
  });
}

void sigmoid_gate_fwd_range(int64_t n, const float* x, const float* g, float* out) {
  for_vectors(n, [&](int64_t i, auto lanes) {
    store_lanes(out + i, load_lanes(x + i, lanes) / sigmoid_denominator(load_lanes(g + i, lanes)), lanes);
  });
}

void sigmoid_gate_bwd_range(int64_t n, const float* d_out, const float* x, const float* g, float* d_x,
                            float* d_g) {
  const Vec one = splat(1.0f);
  for_vectors(n, [&](int64_t i, auto lanes) {
    const Vec s = one / sigmoid_denominator(load_lanes(g + i, lanes));
    const Vec d = load_lanes(d_out + i, lanes);
    store_lanes(d_x + i, d * s, lanes);
    store_lanes(d_g + i, d * load_lanes(x + i, lanes) * s * (one - s), lanes);
  });
}

}  // namespace godwit::kernels::GODWIT_ISA
