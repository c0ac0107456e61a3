// How weights are held in memory while a model runs: in the model's dtype, or packed for inference. Packed
// weights have no gradient and are not saved.
#pragma once

#include <string>

#include "godwit/model/weights.h"

namespace godwit {

struct WeightFormat {
  enum class Experts { kFloat, kInt8, kMxfp4 };
  Experts experts = Experts::kFloat;
  bool int8_linear = false;  // linear layers with ParamInfo::may_pack, and the output head

  bool packs(const ParamInfo& info) const {
    return info.role == ParamRole::kExperts ? experts != Experts::kFloat : int8_linear && info.may_pack;
  }
};

// "int8", "mxfp4" (the experts alone), "mxfp4+int8" (experts, linear layers), or empty: in the model's dtype.
WeightFormat weight_format_of(const std::string& name);

// The matrix that a visitor was given; info.is_matrix must hold.
Matrix& as_matrix(const ParamInfo& info, at::Tensor& value);

// Space for a parameter on `device`, contents undefined. Throws Error where its shape has no such form.
void allocate_param(const ParamInfo& info, const WeightFormat& format, at::Device device,
                    at::ScalarType dtype, at::Tensor& value);

// Writes weights [.., out, in] of floating type into space of that shape, one expert's (`piece`) or, with -1,
// the whole parameter's: converted, or packed. int8: the nearest step of max |w| / 127 of a row; MXFP4: as
// `convert` does.
void store_param(const ParamInfo& info, int64_t piece, const at::Tensor& w, at::Tensor& value);

// Packs weights that are there, one parameter after another.
void pack_weights(const ModelConfig& config, ModelWeights& weights, const WeightFormat& format);

// Held by all parameters.
int64_t weight_bytes(const ModelConfig& config, ModelWeights& weights);
// The same before anything is allocated.
int64_t weight_bytes(const ModelConfig& config, const WeightFormat& format, at::ScalarType dtype);

}  // namespace godwit
