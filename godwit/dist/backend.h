// c10d's backends, behind one call: Gloo for tensors on the CPU, NCCL on the GPU. Which of them a build has,
// CMake finds out: Gloo needs its headers (Debian: libgloo-dev), NCCL a CUDA build of LibTorch and nccl.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>

namespace godwit::dist {

// Collectives among `size` ranks that meet in `store`. They have no time limit of their own: a rank that dies
// or hangs is the monitor's business. Throws Error when the build has no backend for the device.
c10::intrusive_ptr<c10d::Backend> make_backend(at::Device device,
                                               const c10::intrusive_ptr<c10d::Store>& store, int64_t rank,
                                               int64_t size);

}  // namespace godwit::dist
