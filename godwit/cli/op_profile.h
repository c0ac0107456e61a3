// Where the time of a piece of work goes, by LibTorch's profiler: GPU kernels, or ops on the CPU.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace godwit::cli {

struct ProfiledOp {
  std::string name;
  double ms = 0;  // without what it calls
  int64_t calls = 0;
};

struct OpProfile {
  std::vector<ProfiledOp> ops;  // the longest first
  double busy_ms = 0;           // sum over the ops
  double wall_ms = 0;           // from the first to the last
};

// Runs `work` once under the profiler. A GPU: its kernels by name (template arguments left out); a CPU: ops.
OpProfile profile_ops(c10::Device device, const std::function<void()>& work);

}  // namespace godwit::cli
