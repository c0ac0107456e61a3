#include "godwit/cli/random_weights.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace godwit::cli {

ModelWeights random_weights(const ModelConfig& config, c10::Device device, at::ScalarType dtype) {
  ModelWeights weights = weight_structure(config);
  for_each_param(config, weights, [&](const ParamInfo& info, at::Tensor& value) {
    const auto options = at::TensorOptions(info.keep_fp32 ? at::kFloat : dtype).device(device);
    value = at::empty(info.shape, options);
    if (info.shape.size() > 1)
      value.normal_(0, config.initializer_range);
    else
      value.fill_(info.role == ParamRole::kNorm ? 1 : 0);
  });
  return weights;
}

}  // namespace godwit::cli
