// `godwit bench vision`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "godwit/cli/commands.h"

namespace godwit::cli {

struct BenchVisionArgs {
  std::string model = "kimi-k3";
  std::string dtype = "f32";                   // f32 | bf16
  std::vector<std::string> grids = {"16x16"};  // ROWSxCOLUMNS[xFRAMES] in patches
  int64_t count = 1;                           // pictures of each
  int repeats = 5;
  bool agreement = false;
  bool json = false;
  DeviceArgs device;
};
int run_bench_vision(const BenchVisionArgs& args);

}  // namespace godwit::cli
