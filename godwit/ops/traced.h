// Ops under torch.compile and other observers of PyTorch: tensors without data, and dispatch modes.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <optional>

namespace godwit::ops {

// Whether x has shape and type only (meta, fake, functional or with symbolic sizes): its values, and the
// checks that read them, come when the recorded call runs.
inline bool is_dataless(const at::Tensor& x) {
  return x.is_meta() || x.unsafeGetTensorImpl()->has_symbolic_sizes_strides() ||
         x.key_set().has_any(
             c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::Functionalize}));
}

// Whether calls are recorded or compared. A forward then keeps nothing whose size depends on values, and its
// backward computes it again.
inline bool is_observed(const at::Tensor& x) {
  return is_dataless(x) || c10::impl::TorchDispatchModeTLS::any_modes_set();
}

// What a Meta kernel returns: dense, x's options but for the type.
inline at::Tensor meta_tensor(c10::SymIntArrayRef sizes, const at::Tensor& x,
                              std::optional<at::ScalarType> type = std::nullopt) {
  return at::empty_symint(sizes, x.options().dtype(type.value_or(x.scalar_type())));
}
inline at::Tensor meta_like(const at::Tensor& x, std::optional<at::ScalarType> type = std::nullopt) {
  return meta_tensor(x.sym_sizes(), x, type);
}
// A gradient of x that may be absent.
inline at::Tensor meta_gradient(const at::Tensor& x, bool wanted = true) {
  return wanted ? meta_like(x) : at::Tensor();
}

}  // namespace godwit::ops
