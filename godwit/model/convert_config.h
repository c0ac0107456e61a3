// config.json of a converted checkpoint: the source's own, with what the conversion changes.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "godwit/io/tensor_spec.h"
#include "godwit/model/config.h"

namespace godwit {

struct ConvertedConfig {
  nlohmann::json json;
  std::vector<std::string> left_out;  // keys of the source that the other layout has no place for
};

// `source` in the layout of `config`. Keys that nothing here reads stay, in the text model's part; null stays
// null. `packed`: with a quantization_config (the source's if it has one), else without.
ConvertedConfig converted_config(const nlohmann::json& source, const ModelConfig& config, io::Dtype dtype,
                                 bool packed);

}  // namespace godwit
