#include "godwit/kernels/short_conv.h"

#include "godwit/kernels/cpu/dispatch/isa.h"

namespace godwit::kernels {

namespace avx2 {
void short_conv_forward(const ShortConvInputs& in, float* y, float* final_state);
void short_conv_backward(const ShortConvInputs& in, const ShortConvGrads& grads);
void short_conv_step(int64_t channels, int64_t taps, const float* x, const float* weight, float* state,
                     float* y);
}  // namespace avx2
namespace avx512 {
void short_conv_forward(const ShortConvInputs& in, float* y, float* final_state);
void short_conv_backward(const ShortConvInputs& in, const ShortConvGrads& grads);
void short_conv_step(int64_t channels, int64_t taps, const float* x, const float* weight, float* state,
                     float* y);
}  // namespace avx512

void short_conv_forward(const ShortConvInputs& in, float* y, float* final_state) {
  GODWIT_DISPATCH(short_conv_forward, in, y, final_state);
}
void short_conv_backward(const ShortConvInputs& in, const ShortConvGrads& grads) {
  GODWIT_DISPATCH(short_conv_backward, in, grads);
}

void short_conv_step(int64_t channels, int64_t taps, const float* x, const float* weight, float* state,
                     float* y) {
  GODWIT_DISPATCH(short_conv_step, channels, taps, x, weight, state, y);
}

}  // namespace godwit::kernels
