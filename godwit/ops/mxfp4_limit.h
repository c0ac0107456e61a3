// Which MXFP4 scales a device's kernels read as they are.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace godwit::ops {

// The largest E8M0 byte: on a CPU any but NaN; on a GPU 2 (a weight of 12), above which its kernels go on
// with 2.
uint8_t largest_mxfp4_scale(at::Device device);

// An Error if one of the scales (uint8, on the CPU) is larger. `name` is a tensor's or a parameter's.
void check_mxfp4_scales(const std::string& name, const at::Tensor& scales, at::Device device);

}  // namespace godwit::ops
