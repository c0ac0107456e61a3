// Random weights of a model, for benchmarks.
#pragma once

#include "godwit/model/weights.h"

namespace godwit::cli {

// Drawn on the device: a training run's own initialisation draws on the CPU, minutes for billions.
ModelWeights random_weights(const ModelConfig& config, c10::Device device, at::ScalarType dtype);

}  // namespace godwit::cli
