// Where the time of a piece of work goes, by LibTorch's profiler.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace godwit::cli {

struct ProfiledOp {
  std::string name;
  double ms = 0;  // on the CPU without what it calls; on a GPU of the kernels it launched
  int64_t calls = 0;
};

struct OpProfile {
  std::vector<ProfiledOp> ops;      // the longest first; on a GPU this project's ops with all that they call
  std::vector<ProfiledOp> kernels;  // on a GPU: the same time by kernel
  double busy_ms = 0;               // sum over the ops
  double wall_ms = 0;               // from the first to the last
};

// Runs `work` once under the profiler.
OpProfile profile_ops(c10::Device device, const std::function<void()>& work);

// The longest of them, as --json has it and for people, with what was profiled.
nlohmann::json profile_json(const OpProfile& profile);
void print_profile(std::string_view what, const OpProfile& profile);

}  // namespace godwit::cli
