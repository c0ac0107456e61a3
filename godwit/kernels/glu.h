// Gated linear unit f(g, u) = act(g) lin(u), elementwise, fp32.
//   act(g) = beta_gate tanh(g / beta_gate) sigmoid(g), or g sigmoid(g) where beta_gate = 0
//   lin(u) = beta_up tanh(u / beta_up), or u where beta_up = 0
// (SiTU, Kimi K3 technical report eq. 12; SwiGLU with both 0.)
#pragma once

#include <cstdint>

namespace godwit::kernels {

struct GluForm {
  float beta_gate = 0;
  float beta_up = 0;
};

void glu_fwd(int64_t n, const float* g, const float* u, GluForm form, float* out);
// Gradients from d_out and the inputs.
void glu_bwd(int64_t n, const float* d_out, const float* g, const float* u, GluForm form, float* d_g,
             float* d_u);

// x sigmoid(g), elementwise: an output gate.
void sigmoid_gate_fwd(int64_t n, const float* x, const float* g, float* out);
void sigmoid_gate_bwd(int64_t n, const float* d_out, const float* x, const float* g, float* d_x, float* d_g);

}  // namespace godwit::kernels
