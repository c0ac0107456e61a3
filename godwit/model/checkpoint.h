// Weights to and from a Hugging Face directory in the released layout (layout.h).
#pragma once

#include <string>

#include "godwit/model/weight_format.h"

namespace godwit {

// Every tensor of `config` must be there with its shape and a type that converts; extra tensors are an error
// too. The vision tower and projector of the configuration are all there, or none of them (then `vision` of
// the result is empty). Nothing is allocated before all names, shapes and types of all files are checked.
// Floating types are converted to `dtype`, MXFP4 experts dequantised, parameters marked keep_fp32 converted
// to fp32. What `format` packs is packed as it is read, one expert or matrix at a time; MXFP4 experts of the
// file keep their bytes where the format is MXFP4. Files are read once, one after another.
ModelWeights load_weights(const ModelConfig& config, const std::string& directory, at::Device device,
                          at::ScalarType dtype, const WeightFormat& format = {});

// Writes config.json, generation_config.json and the tensors into `directory` (which exists and holds no
// checkpoint). Matrices are stored in config.dtype, keep_fp32 parameters in fp32.
void save_weights(const ModelConfig& config, ModelWeights& weights, const std::string& directory);

// "float32" -> kFloat, "bfloat16" -> kBFloat16; anything else is an Error.
at::ScalarType scalar_type_of(const std::string& dtype);

}  // namespace godwit
