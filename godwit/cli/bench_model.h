// The model of a benchmark of inference: a directory, or random weights where there is only a configuration.
#pragma once

#include <string>

#include "godwit/cli/commands.h"
#include "godwit/infer/model.h"

namespace godwit::cli {

// `name`: a model directory, or a preset or config.json. Without a tokenizer of its own the model has one
// whose ids stand for no text.
LoadedModel open_bench_model(const std::string& name, const std::string& dtype, const std::string& weights,
                             const DeviceArgs& device);

}  // namespace godwit::cli
