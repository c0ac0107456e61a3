#include "godwit/train/muon.h"

#include <ATen/ATen.h>

namespace godwit {

void newton_schulz_(at::Tensor& batch, int64_t steps) {
  constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;
  if (batch.numel() == 0) return;
  const bool tall = batch.size(1) > batch.size(2);
  at::Tensor x = batch / (at::linalg_vector_norm(batch, 2, {1, 2}, /*keepdim=*/true) + 1e-7);
  for (int64_t i = 0; i < steps; ++i) {
    const at::Tensor gram = tall ? at::bmm(x.mT(), x) : at::bmm(x, x.mT());  // A, of the smaller side
    const at::Tensor poly = at::baddbmm(gram, gram, gram, kB, kC);           // b A + c A^2
    x = tall ? at::baddbmm(x, x, poly, kA, 1) : at::baddbmm(x, poly, x, kA, 1);
  }
  batch.copy_(x);
}

}  // namespace godwit
