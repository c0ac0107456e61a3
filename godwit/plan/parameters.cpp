#include "godwit/plan/parameters.h"

#include <ATen/core/Tensor.h>

#include <string>

namespace godwit {

void for_each_size(const ModelConfig& config, const std::function<void(const SizedParam&)>& visit) {
  ModelWeights structure = weight_structure(config);
  for_each_param(config, structure, [&](const ParamInfo& info, at::Tensor&) {
    double count = 1;
    for (const int64_t size : info.shape) count *= static_cast<double>(size);
    const size_t at = info.name.find("layers.");
    visit({.info = info,
           .count = count,
           .layer = at == std::string::npos ? -1 : std::stoll(info.name.substr(at + 7)),
           .trained = info.role != ParamRole::kRouterBias,
           .muon = info.role == ParamRole::kMatrix || info.role == ParamRole::kExperts});
  });
}

}  // namespace godwit
