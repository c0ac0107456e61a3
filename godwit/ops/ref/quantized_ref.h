// Packed weights as fp32, in plain ATen.
#pragma once

#include <ATen/core/Tensor.h>

namespace godwit::ops::ref {

// values int8 [..., K], scale fp32 [...].
at::Tensor dequantize_int8(const at::Tensor& values, const at::Tensor& scale);

// packed uint8 [..., K / 2], scale uint8 [..., K / 32] (io/mxfp4.h).
at::Tensor dequantize_mxfp4(const at::Tensor& packed, const at::Tensor& scale);

// Either, by the dtype of `values`.
at::Tensor dequantize(const at::Tensor& values, const at::Tensor& scale);

}  // namespace godwit::ops::ref
