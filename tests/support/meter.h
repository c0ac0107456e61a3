// Counts the bytes of tensors through LibTorch's allocator hooks.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>

namespace godwit::test {

// Live bytes of all tensors on the CPU, and their largest number.
class Meter : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
    const int64_t now = live += bytes;
    int64_t before = peak.load();
    while (now > before && !peak.compare_exchange_weak(before, now)) {
    }
  }
  bool memoryProfilingEnabled() const override { return true; }

  std::atomic<int64_t> live{0}, peak{0};
};

}  // namespace godwit::test
