// Plain composition of glu: any device and type, differentiable by autograd. Oracle in fp64.
#pragma once

#include <ATen/core/Tensor.h>

namespace godwit::ops::ref {

at::Tensor glu(const at::Tensor& g, const at::Tensor& u, double beta_gate, double beta_up);

at::Tensor sigmoid_gate(const at::Tensor& x, const at::Tensor& g);

}  // namespace godwit::ops::ref
