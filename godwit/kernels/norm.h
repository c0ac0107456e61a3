// Launchers of RMS normalisation on raw pointers, fp32. Rows are `width` long and dense.
#pragma once

#include <cstdint>

namespace godwit::kernels {

// y = x rsqrt(mean x^2 + eps) weight, times sigmoid(gate) if there is a gate.
struct RmsNormInputs {
  int64_t rows = 0, width = 0;
  const float* x = nullptr;
  int64_t x_stride = 0;  // between rows
  const float* gate = nullptr;
  int64_t gate_stride = 0;
  const float* weight = nullptr;  // [width]
  float eps = 0;
};
void rms_norm_forward(const RmsNormInputs& in, float* y);

// Results are dense; dgate only with a gate.
void rms_norm_backward(const RmsNormInputs& in, const float* grad, float* dx, float* dgate, float* dweight);

}  // namespace godwit::kernels
