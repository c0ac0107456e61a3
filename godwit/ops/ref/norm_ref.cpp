#include "godwit/ops/ref/norm_ref.h"

#include <ATen/ATen.h>

#include <vector>

#include "godwit/ops/autograd_util.h"

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

std::tuple<Tensor, Tensor, Tensor> rms_norm_ref_grads(const Tensor& grad, const Tensor& x,
                                                      const std::optional<Tensor>& gate, const Tensor& weight,
                                                      double eps) {
  std::vector<Tensor> inputs = {x, weight};
  if (gate.has_value()) inputs.push_back(*gate);
  const auto grads = composition_grads(inputs, {grad}, [&](const std::vector<Tensor>& in) {
    return std::vector<Tensor>{in.size() > 2 ? rms_norm_gated_ref(in[0], in[2], in[1], eps)
                                             : rms_norm_ref(in[0], in[1], eps)};
  });
  return {grads[0], gate.has_value() ? grads[2] : Tensor(), grads[1]};
}

}  // namespace godwit::ops::ref
