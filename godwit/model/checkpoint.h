// Weights to and from a Hugging Face directory, in the released names and shapes: one tensor an expert,
// convolutions [C, 1, W], AttnRes queries [1, D], A_log zero-padded to a multiple of 128 (K3; the padding
// must be zero) or [1, 1, H, 1] (Kimi-Linear); [H] is read too. Routed experts may be stored as MXFP4
// (weight_packed, weight_scale).
#pragma once

#include <string>

#include "godwit/model/weights.h"

namespace godwit {

// Reads config.json's model. Every tensor must be there with its shape; extra tensors are an error too
// (vision tensors of a text-only load are passed over). Nothing is allocated before all names and shapes are
// checked. Floating types are converted to `dtype`, parameters marked keep_fp32 to fp32.
ModelWeights load_weights(const ModelConfig& config, const std::string& directory, at::Device device,
                          at::ScalarType dtype);

// Writes config.json, generation_config.json and the tensors into `directory` (which exists and holds no
// checkpoint). Matrices are stored in config.dtype, keep_fp32 parameters in fp32.
void save_weights(const ModelConfig& config, ModelWeights& weights, const std::string& directory);

// "float32" -> kFloat, "bfloat16" -> kBFloat16; anything else is an Error.
at::ScalarType scalar_type_of(const std::string& dtype);

}  // namespace godwit
