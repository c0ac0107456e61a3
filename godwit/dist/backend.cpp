// GODWIT_GLOO and GODWIT_NCCL come from CMakeLists.txt; c10d's headers hide their classes behind USE_C10D_*.
#include "godwit/dist/backend.h"

#ifdef GODWIT_GLOO
#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO
#endif
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#endif
#ifdef GODWIT_NCCL
#ifndef USE_C10D_NCCL
#define USE_C10D_NCCL
#endif
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include <chrono>
#include <cstdlib>

#include "godwit/base/check.h"

namespace godwit::dist {
namespace {

[[maybe_unused]] constexpr std::chrono::hours kNever(24 * 365);

c10::intrusive_ptr<c10d::Backend> make_gloo([[maybe_unused]] const c10::intrusive_ptr<c10d::Store>& store,
                                            [[maybe_unused]] int rank, [[maybe_unused]] int size) {
#ifdef GODWIT_GLOO
  auto options = c10d::ProcessGroupGloo::Options::create(kNever);
  // GLOO_SOCKET_IFNAME as in PyTorch: the network to use where a host has several.
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  options->devices.push_back(interface != nullptr
                                 ? c10d::ProcessGroupGloo::createDeviceForInterface(interface)
                                 : c10d::ProcessGroupGloo::createDefaultDevice());
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
#else
  fail(
      "several processes on the CPU need Gloo, which this build does not have: install libgloo-dev and "
      "configure "
      "again");
#endif
}

c10::intrusive_ptr<c10d::Backend> make_nccl([[maybe_unused]] const c10::intrusive_ptr<c10d::Store>& store,
                                            [[maybe_unused]] int rank, [[maybe_unused]] int size) {
#ifdef GODWIT_NCCL
  // c10d's own watchdogs would end the process with a stack trace; ours names the rank.
  ::setenv("TORCH_NCCL_ENABLE_MONITORING", "0", /*overwrite=*/0);
  ::setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", /*overwrite=*/0);
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = kNever;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, options);
#else
  fail("several GPUs need NCCL, which this build does not have: a CUDA build of LibTorch and nccl.h");
#endif
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(at::Device device,
                                               const c10::intrusive_ptr<c10d::Store>& store, int64_t rank,
                                               int64_t size) {
  const auto r = static_cast<int>(rank), n = static_cast<int>(size);
  return device.is_cuda() ? make_nccl(store, r, n) : make_gloo(store, r, n);
}

}  // namespace godwit::dist
