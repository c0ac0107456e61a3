// What a run is made of before its first step: data, model configuration, weights.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "godwit/data/dataset.h"
#include "godwit/data/loader.h"
#include "godwit/model/weights.h"
#include "godwit/train/recipe.h"

namespace godwit {

struct RunData {
  std::vector<std::shared_ptr<const data::TokenDataset>> train;  // as recipe.data
  std::vector<std::shared_ptr<const data::TokenDataset>>
      held_out;  // eval.data, or the data sets' own held-out parts
  int64_t vocab_size = 0;
  std::optional<io::ImageProcessorConfig> processor;  // of the pictures, where there are some
};

// The tokenizer that the trained model is saved with: the recipe's, else `init`'s; empty: there is none.
std::string tokenizer_directory(const Recipe& recipe);

// Opens all data sets; those of different tokenizers do not mix, nor does the run's own tokenizer with
// another's data, nor pictures cut in different ways.
RunData open_data(const Recipe& recipe);

// The recipe's model: preset, directory or file (or `init`'s), its overrides, the data's vocabulary and
// special ids (a preset takes them over; a model directory must fit them).
ModelConfig resolve_model(const Recipe& recipe, const RunData& data);

// The configuration of one stage: rotation base and window as the stage says.
ModelConfig stage_config(const ModelConfig& config, const StageOptions& stage);

// The stage's sequences. Data sets whose weight is 0 in the stage's mix are left out.
std::unique_ptr<data::PackedLoader> stage_loader(const Recipe& recipe, const RunData& data, size_t stage);

}  // namespace godwit
