#include "godwit/infer/model.h"

#include <ATen/ATen.h>

#include "godwit/base/check.h"
#include "godwit/model/checkpoint.h"

namespace godwit {

LoadedModel load_model(const std::string& directory, at::Device device, std::optional<at::ScalarType> dtype,
                       const WeightFormat& format) {
  const ModelConfig config = load_model_config(directory);
  Tokenizer tokenizer = Tokenizer::load(directory);
  check(tokenizer.vocab_size() <= config.vocab_size,
        "{}: the tokenizer has {} ids, the model's vocabulary {}", directory, tokenizer.vocab_size(),
        config.vocab_size);
  io::ImageProcessorConfig processor = load_image_processor(directory, config);
  return {.config = config,
          .weights =
              load_weights(config, directory, device, dtype.value_or(scalar_type_of(config.dtype)), format),
          .tokenizer = std::move(tokenizer),
          .device = device,
          .images = processor};
}

int64_t context_limit(const ModelConfig& config) {
  return config.max_position > 0 ? config.max_position : int64_t{1} << 20;
}

std::vector<int32_t> text_stop_ids(const LoadedModel& model) {
  std::vector<int32_t> ids;
  for (const std::string_view name : {kEos, kEndOfMsg}) {
    if (const auto id = model.tokenizer.find_special(name)) ids.push_back(*id);
  }
  if (model.config.eos_id >= 0) ids.push_back(static_cast<int32_t>(model.config.eos_id));
  return ids;
}

at::Tensor forbidden_tokens(const LoadedModel& model, std::span<const int32_t> allowed) {
  at::Tensor mask = at::zeros({model.config.vocab_size}, at::kBool);
  mask.slice(0, model.tokenizer.ranks()).fill_(true);
  for (const int32_t id : allowed) {
    check(id >= 0 && id < model.config.vocab_size, "token id {} lies outside the vocabulary of {}", id,
          model.config.vocab_size);
    mask[id] = false;
  }
  return mask;
}

}  // namespace godwit
