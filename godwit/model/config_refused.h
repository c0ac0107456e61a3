// What a configuration may say that no layer here does. Keys that no one knows pass, as they do in
// transformers; a key that is known to mean other mathematics must have the value that is computed.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "godwit/model/config.h"

namespace godwit {

// Whether there is a quantization_config: experts may then be packed.
bool has_quantization(const nlohmann::json& root);

// Values of single keys, and a quantization_config other than MXFP4's. Error that names `where` and the key.
void refuse_other_models(const nlohmann::json& root, const std::string& where);

// Keys that say again what `config`, read from `root`, already holds, and differ.
void refuse_contradictions(const nlohmann::json& root, const ModelConfig& config, const std::string& where);

}  // namespace godwit
