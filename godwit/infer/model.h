// A model directory in memory, with what drawing tokens from it needs to know.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "godwit/model/config.h"
#include "godwit/model/media.h"
#include "godwit/model/weight_format.h"
#include "godwit/text/tokenizer.h"

namespace godwit {

struct LoadedModel {
  ModelConfig config;
  ModelWeights weights;
  Tokenizer tokenizer;
  at::Device device;
  io::ImageProcessorConfig images = {};  // preprocessor_config.json
};

// A model directory: config.json, weights, tokenizer. The tokenizer's ids must fit the vocabulary. Without a
// dtype the weights keep the checkpoint's.
LoadedModel load_model(const std::string& directory, at::Device device,
                       std::optional<at::ScalarType> dtype = std::nullopt, const WeightFormat& format = {});

// Tokens that a sequence may have: what the configuration says, or a million where it says nothing.
int64_t context_limit(const ModelConfig& config);

// What ends a text: [EOS], <|end_of_msg|> and the configuration's eos_token_id.
std::vector<int32_t> text_stop_ids(const LoadedModel& model);

// [V] bool: true at special tokens and at ids without a token, except those in `allowed`. What is true is
// never drawn.
at::Tensor forbidden_tokens(const LoadedModel& model, std::span<const int32_t> allowed);

}  // namespace godwit
