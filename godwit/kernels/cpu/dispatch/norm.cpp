#include "godwit/kernels/norm.h"

#include "godwit/kernels/cpu/dispatch/isa.h"

namespace godwit::kernels {

namespace avx2 {
void rms_norm_forward(const RmsNormInputs& in, float* y);
void rms_norm_backward(const RmsNormInputs& in, const float* grad, float* dx, float* dgate, float* dweight);
}  // namespace avx2
namespace avx512 {
void rms_norm_forward(const RmsNormInputs& in, float* y);
void rms_norm_backward(const RmsNormInputs& in, const float* grad, float* dx, float* dgate, float* dweight);
}  // namespace avx512

void rms_norm_forward(const RmsNormInputs& in, float* y) {
  GODWIT_DISPATCH(rms_norm_forward, in, y);
}
void rms_norm_backward(const RmsNormInputs& in, const float* grad, float* dx, float* dgate, float* dweight) {
  GODWIT_DISPATCH(rms_norm_backward, in, grad, dx, dgate, dweight);
}

}  // namespace godwit::kernels
