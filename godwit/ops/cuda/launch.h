// What the CUDA registrations share: operands as the kernels want them, offsets on the device, error codes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/cuda/CUDAStream.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "godwit/kernels/layer_gpu.h"

namespace godwit::ops::cuda {

// Whether vector loads and bulk copies, which want 16 bytes, may start at its first element.
inline bool aligned(const at::Tensor& x) {
  return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
}
// Contiguous and aligned.
at::Tensor dense(const at::Tensor& x);

// A tensor's memory, or null where there is none.
inline void* pointer(const at::Tensor& x) {
  return x.defined() && x.numel() > 0 ? x.mutable_data_ptr() : nullptr;
}
template <class T>
T* pointer_as(const at::Tensor& x) {
  return static_cast<T*>(pointer(x));
}

// A parameter vector as the kernels take it.
inline bool is_weight(const at::Tensor& x) {
  return x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16;
}
inline kernels::cuda::WeightVector weight_vector(const at::Tensor& x) {
  return {pointer(x), x.scalar_type() == at::kBFloat16};
}
inline kernels::cuda::WeightGradient weight_gradient(const at::Tensor& x) {
  return {pointer(x), x.scalar_type() == at::kBFloat16};
}

// The kernels are compiled for Hopper only.
bool is_hopper(const at::Device& device);

// Uninitialised bytes from the caching allocator; they may be reused once work enqueued so far on `stream`,
// the current one, is done.
at::Tensor workspace(size_t bytes, const at::Device& device);

// A copy of a CPU tensor that does not wait for the GPU, as one from pageable memory would.
at::Tensor to_device(const at::Tensor& x, const at::Device& device);

// The N+1 offsets of packed sequences as the kernels take them.
struct Offsets {
  at::Tensor keep;                // owns the memory
  const int64_t* data = nullptr;  // on the device, or null: all sequences are equally long
  int64_t longest = 0;
};
Offsets device_offsets(const at::Tensor& cu_seqlens, const at::Device& device);

// Throws if a launcher returned an error.
void check_launch(const char* op, int error);

}  // namespace godwit::ops::cuda
