#include "godwit/ops/matrix.h"

#include <ATen/ATen.h>

#include "godwit/ops/ref/quantized_ref.h"

namespace godwit::ops {
namespace {

const Tensor& plain(const Matrix& w) {
  return w;
}

}  // namespace

Tensor unpacked(const Matrix& w) {
  return w.packed() ? ref::dequantize(w, w.scale) : plain(w);
}

Tensor linear(const Tensor& x, const Matrix& w) {
  return w.packed() ? linear_int8(x, w, w.scale) : ops::linear(x, plain(w));
}

Tensor moe_experts(const Tensor& z, const Tensor& experts, const Tensor& weights, const Matrix& w1,
                   const Matrix& w3, const Matrix& w2, double beta_gate, double beta_up) {
  if (!w1.packed()) {
    return moe_experts(z, experts, weights, plain(w1), plain(w3), plain(w2), beta_gate, beta_up);
  }
  return moe_experts_quantized(z, experts, weights, {w1, w1.scale, w3, w3.scale, w2, w2.scale}, beta_gate,
                               beta_up);
}

}  // namespace godwit::ops
