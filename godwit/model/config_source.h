// Where a configuration comes from, for errors.
#pragma once

#include <string>

namespace godwit {

// Of MODEL (config.h): "DIR/config.json", a file, or the preset's name.
std::string model_json_path(const std::string& model);

}  // namespace godwit
