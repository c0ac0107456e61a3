#include "godwit/ops/ref/norm_ref.h"

#include <ATen/ATen.h>

namespace godwit::ops::ref {
namespace {

using at::Tensor;

at::ScalarType compute_type(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

Tensor normalized(const Tensor& x, const Tensor& weight, double eps) {
  const Tensor y = x.to(compute_type(x));
  return y * at::rsqrt((y * y).mean(-1, /*keepdim=*/true) + eps) * weight.to(y.scalar_type());
}

}  // namespace

Tensor rms_norm_ref(const Tensor& x, const Tensor& weight, double eps) {
  return normalized(x, weight, eps).to(x.scalar_type());
}

Tensor rms_norm_gated_ref(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps) {
  return (normalized(x, weight, eps) * at::sigmoid(gate.to(compute_type(x)))).to(x.scalar_type());
}

}  // namespace godwit::ops::ref
