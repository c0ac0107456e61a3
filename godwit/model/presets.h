// The files of configs/models, compiled in, so that the binary needs no data beside it.
#pragma once

#include <span>
#include <string_view>

namespace godwit {

struct Preset {
  std::string_view name;  // file name without .json
  std::string_view text;
};

std::span<const Preset> presets();  // defined in a file that CMake writes (cmake/presets.cmake)

}  // namespace godwit
