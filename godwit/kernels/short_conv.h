// Launchers of the causal depthwise convolution with SiLU on raw pointers, fp32. Legend: T tokens of N packed
// sequences, C channels, W taps.
#pragma once

#include <cstdint>

namespace godwit::kernels {

// y_t = silu(sum_j weight[j] x_{t-W+1+j}); before a sequence's first token stand the W-1 inputs of its state.
struct ShortConvInputs {
  int64_t channels = 0, taps = 0, sequences = 0;
  const int64_t* cu_seqlens = nullptr;  // [N + 1]
  const float* x = nullptr;             // [T, C]
  int64_t x_stride = 0;                 // between tokens
  const float* weight = nullptr;        // [C, W]
  const float* state = nullptr;         // [N, C, W-1], oldest first; null = zeros
};
void short_conv_forward(const ShortConvInputs& in, float* y, float* final_state);

// One token of one sequence: x, y [C]; state [C, W-1] is moved on. The bits of short_conv_forward.
void short_conv_step(int64_t channels, int64_t taps, const float* x, const float* weight, float* state,
                     float* y);

struct ShortConvGrads {
  const float* grad_y = nullptr;            // [T, C] or null = zeros
  const float* grad_final_state = nullptr;  // [N, C, W-1] or null = zeros
  float* dx = nullptr;                      // [T, C]
  float* dweight = nullptr;                 // [C, W]
  float* dstate = nullptr;                  // [N, C, W-1] or null
};
void short_conv_backward(const ShortConvInputs& in, const ShortConvGrads& grads);

}  // namespace godwit::kernels
