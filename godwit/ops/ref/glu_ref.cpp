#include "godwit/ops/ref/glu_ref.h"

#include <ATen/ATen.h>

#include "godwit/ops/arguments.h"

namespace godwit::ops::ref {

at::Tensor glu(const at::Tensor& g, const at::Tensor& u, double beta_gate, double beta_up) {
  const at::Tensor gate = g.to(work_type(g));
  const at::Tensor up = u.to(work_type(g));
  const at::Tensor act =
      beta_gate > 0 ? beta_gate * at::tanh(gate / beta_gate) * at::sigmoid(gate) : gate * at::sigmoid(gate);
  const at::Tensor lin = beta_up > 0 ? beta_up * at::tanh(up / beta_up) : up;
  return (act * lin).to(g.scalar_type());
}

at::Tensor sigmoid_gate(const at::Tensor& x, const at::Tensor& g) {
  return (x.to(work_type(x)) * at::sigmoid(g.to(work_type(x)))).to(x.scalar_type());
}

}  // namespace godwit::ops::ref
