// Checks of op arguments. Every message names the op and the argument, what was expected and what was given.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>

namespace godwit::ops {

// The type sums are taken in: fp64 stays fp64 (oracles and gradient checks), everything else is summed in
// fp32.
inline at::ScalarType work_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// An argument under its name, for messages: {"moe_experts", "z", z}.
struct Argument {
  const char* op;
  const char* name;
  const at::Tensor& tensor;
};

// Floating point (fp32, bf16, fp16 or fp64) with `dim` dimensions.
inline void check_float(const Argument& a, int64_t dim) {
  TORCH_CHECK(at::isFloatingType(a.tensor.scalar_type()), a.op, ": ", a.name,
              ": expected a floating-point tensor, got ", a.tensor.scalar_type());
  TORCH_CHECK(a.tensor.dim() == dim, a.op, ": ", a.name, ": expected ", dim, " dimensions, got shape ",
              a.tensor.sizes());
}

inline void check_shape(const Argument& a, at::IntArrayRef expected) {
  TORCH_CHECK(a.tensor.sizes() == expected, a.op, ": ", a.name, ": expected shape ", expected, ", got ",
              a.tensor.sizes());
}

inline void check_type(const Argument& a, at::ScalarType expected) {
  TORCH_CHECK(a.tensor.scalar_type() == expected, a.op, ": ", a.name, ": expected ", expected, ", got ",
              a.tensor.scalar_type());
}

// Same type and device as `other`.
inline void check_like(const Argument& a, const Argument& other) {
  TORCH_CHECK(a.tensor.scalar_type() == other.tensor.scalar_type(), a.op, ": ", a.name,
              ": expected the type of ", other.name, " (", other.tensor.scalar_type(), "), got ",
              a.tensor.scalar_type());
  TORCH_CHECK(a.tensor.device() == other.tensor.device(), a.op, ": ", a.name, ": expected the device of ",
              other.name, " (", other.tensor.device(), "), got ", a.tensor.device());
}

inline void check_device(const Argument& a, const Argument& other) {
  TORCH_CHECK(a.tensor.device() == other.tensor.device(), a.op, ": ", a.name, ": expected the device of ",
              other.name, " (", other.tensor.device(), "), got ", a.tensor.device());
}

}  // namespace godwit::ops
