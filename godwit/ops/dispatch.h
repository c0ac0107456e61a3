// How an op with fused kernels finds them. Beside its public schema, which is a composite (it runs under
// autograd and decides), such an op has `<op>_fwd` and `<op>_bwd`, registered for the devices that have
// kernels.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace godwit::ops {

template <class Signature>
c10::TypedOperatorHandle<Signature> typed_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Whether `op` has a kernel for x's device and x's type is one they take: fp64 always goes the plain way.
inline bool has_kernel(const c10::OperatorHandle& op, const at::Tensor& x) {
  if (x.scalar_type() == at::kDouble) return false;
  const auto key = x.is_cuda()   ? c10::DispatchKey::CUDA
                   : x.is_meta() ? c10::DispatchKey::Meta
                                 : c10::DispatchKey::CPU;
  return op.hasKernelForDispatchKey(key);
}

template <class... Tensors>
bool needs_grad(const Tensors&... inputs) {
  return at::GradMode::is_enabled() && (inputs.requires_grad() || ...);
}

// As the CPU kernels take it: contiguous fp32. Other types are converted around the kernels.
inline at::Tensor as_float(const at::Tensor& x) {
  return x.to(at::kFloat).contiguous();
}

}  // namespace godwit::ops
