#include "godwit/ops/mxfp4_limit.h"

#include <ATen/ATen.h>

#include "godwit/base/check.h"

namespace godwit::ops {

uint8_t largest_mxfp4_scale(at::Device device) {
  return device.is_cuda() ? 128 : 254;
}

void check_mxfp4_scales(const std::string& name, const at::Tensor& scales, at::Device device) {
  if (scales.numel() == 0) return;
  const int largest = scales.max().item<uint8_t>(), limit = largest_mxfp4_scale(device);
  check(largest <= limit,
        "{}: a scale of 2^{}, and the MXFP4 kernels of {} take 2^{} at most: load it without --weights mxfp4",
        name, largest - 127, device.str(), limit - 127);
}

}  // namespace godwit::ops
