// A weight as models hold it: a floating tensor, or, for inference, packed values beside their scales.
//   int8    values int8 [..., out, in], scale fp32 [..., out]
//   MXFP4   values uint8 [..., out, in / 2], scale uint8 [..., out, in / 32] (io/mxfp4.h), experts only
#pragma once

#include "godwit/ops/ops.h"

namespace godwit::ops {

struct Matrix : Tensor {
  Matrix() = default;
  Matrix(Tensor floating) : Tensor(std::move(floating)) {}  // NOLINT: a plain weight is a Matrix
  Matrix(Tensor values, Tensor scales) : Tensor(std::move(values)), scale(std::move(scales)) {}

  bool packed() const { return scale.defined(); }
  int64_t bytes() const {
    return static_cast<int64_t>(nbytes()) + (packed() ? static_cast<int64_t>(scale.nbytes()) : 0);
  }
  Tensor scale;
};

// The weight in fp32 if it is packed, else as it is.
Tensor unpacked(const Matrix& w);

// linear, linear_int8.
Tensor linear(const Tensor& x, const Matrix& w);

// moe_experts, moe_experts_quantized; w1, w3, w2 in the same form.
Tensor moe_experts(const Tensor& z, const Tensor& experts, const Tensor& weights, const Matrix& w1,
                   const Matrix& w3, const Matrix& w2, double beta_gate, double beta_up);

}  // namespace godwit::ops
