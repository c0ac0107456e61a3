#include "godwit/ops/cuda/launch.h"

#include <ATen/ATen.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

namespace godwit::ops::cuda {
namespace {

// The last offsets that this thread sent to a device. All layers of a model use the same ones, so one entry
// saves nearly every copy. Reuse is safe only in the stream that made the copy.
struct LastOffsets {
  std::vector<int64_t> values;
  at::Tensor on_device;
  std::optional<c10::Stream> stream;
};

LastOffsets& last_offsets() {
  // Never destroyed: when a thread ends, the driver may be gone already.
  thread_local auto* const last = new LastOffsets;
  return *last;
}

}  // namespace

at::Tensor dense(const at::Tensor& x) {
  at::Tensor y = x.contiguous();
  if (!aligned(y)) y = y.clone();
  return y;
}

bool is_hopper(const at::Device& device) {
  int major = 0, minor = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index()) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device.index()) == cudaSuccess &&
         major == 9 && minor == 0;
}

at::Tensor workspace(size_t bytes, const at::Device& device) {
  return at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions(at::kByte).device(device));
}

at::Tensor to_device(const at::Tensor& x, const at::Device& device) {
  return x.pin_memory().to(device, x.scalar_type(), /*non_blocking=*/true);
}

Offsets device_offsets(const at::Tensor& cu_seqlens, const at::Device& device) {
  const int64_t* begin = cu_seqlens.const_data_ptr<int64_t>();
  const std::vector<int64_t> values(begin, begin + cu_seqlens.numel());
  Offsets out;
  bool equal = true;
  for (size_t n = 0; n + 1 < values.size(); ++n) {
    const int64_t length = values[n + 1] - values[n];
    out.longest = std::max(out.longest, length);
    equal = equal && length == values[1];
  }
  if (equal) return out;
  LastOffsets& last = last_offsets();
  const c10::Stream stream = c10::cuda::getCurrentCUDAStream(device.index()).unwrap();
  if (last.values != values || last.stream != stream) {
    last = {values, to_device(cu_seqlens, device), stream};
  }
  out.keep = last.on_device;
  out.data = out.keep.const_data_ptr<int64_t>();
  return out;
}

void check_launch(const char* op, int error) {
  TORCH_CHECK(error == cudaSuccess, op,
              ": CUDA error: ", cudaGetErrorString(static_cast<cudaError_t>(error)));
}

}  // namespace godwit::ops::cuda
