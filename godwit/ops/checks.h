// Argument checks of the op faces. Each throws c10::Error with one line: op, argument, expected, given.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <initializer_list>

namespace godwit::ops {

inline void check_floating(const char* op, const char* name, const at::Tensor& x) {
  const auto type = x.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf, op,
              ": ", name, ": expected float32, float64, bfloat16 or float16, got ", type);
}

inline void check_dtype(const char* op, const char* name, const at::Tensor& x, at::ScalarType expected) {
  TORCH_CHECK(x.scalar_type() == expected, op, ": ", name, ": expected dtype ", expected, ", got ",
              x.scalar_type());
}

inline void check_device(const char* op, const char* name, const at::Tensor& x, const at::Device& expected) {
  TORCH_CHECK(x.device() == expected, op, ": ", name, ": expected device ", expected, ", got ", x.device());
}

// A size of -1 accepts any.
inline void check_sizes(const char* op, const char* name, const at::Tensor& x,
                        std::initializer_list<int64_t> expected) {
  const at::IntArrayRef sizes(expected);
  bool fits = x.dim() == static_cast<int64_t>(sizes.size());
  for (int64_t i = 0; fits && i < x.dim(); ++i) fits = sizes[i] < 0 || x.size(i) == sizes[i];
  TORCH_CHECK(fits, op, ": ", name, ": expected shape ", sizes, " (-1 = any), got ", x.sizes());
}

// Offsets of packed sequences: int64 [N+1] on the CPU, from 0 to `tokens`, not decreasing. Returns N.
inline int64_t check_cu_seqlens(const char* op, const char* name, const at::Tensor& cu, int64_t tokens) {
  TORCH_CHECK(cu.device().is_cpu(), op, ": ", name, ": expected a tensor on the CPU, got ", cu.device());
  check_dtype(op, name, cu, at::kLong);
  TORCH_CHECK(cu.dim() == 1 && cu.numel() >= 1, op, ": ", name, ": expected shape [N+1], got ", cu.sizes());
  TORCH_CHECK(cu.is_contiguous(), op, ": ", name, ": expected a contiguous tensor");
  const int64_t* offset = cu.const_data_ptr<int64_t>();
  const int64_t n = cu.numel() - 1;
  TORCH_CHECK(offset[0] == 0, op, ": ", name, ": expected the first offset 0, got ", offset[0]);
  for (int64_t i = 0; i < n; ++i) {
    TORCH_CHECK(offset[i] <= offset[i + 1], op, ": ", name, ": offsets must not decrease, got ", offset[i],
                " then ", offset[i + 1], " at index ", i + 1);
  }
  TORCH_CHECK(offset[n] == tokens, op, ": ", name, ": expected the last offset to be T = ", tokens, ", got ",
              offset[n]);
  return n;
}

}  // namespace godwit::ops
