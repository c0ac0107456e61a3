#include "godwit/cli/bench_model.h"

#include <algorithm>
#include <filesystem>

#include "godwit/base/check.h"
#include "godwit/cli/random_weights.h"
#include "godwit/cli/support.h"
#include "godwit/model/checkpoint.h"

namespace godwit::cli {
namespace {

namespace fs = std::filesystem;

// As many ids as the vocabulary has: the bytes, then their number in three of them.
Tokenizer nameless_tokenizer(const ModelConfig& config) {
  const int64_t ranks = config.vocab_size - kSpecialTokens;
  check(ranks >= 256, "bench: a vocabulary of {} has no room for bytes and {} special tokens",
        config.vocab_size, kSpecialTokens);
  std::vector<std::string> tokens;
  for (int64_t id = 0; id < ranks; ++id) {
    const auto byte = [&](int shift) { return static_cast<char>(id >> shift & 0xff); };
    tokens.push_back(id < 256 ? std::string{byte(0)} : std::string{byte(16), byte(8), byte(0)});
  }
  return Tokenizer::from_ranks(std::move(tokens));
}

}  // namespace

LoadedModel open_bench_model(const std::string& name, const std::string& dtype, const std::string& weights,
                             const DeviceArgs& device_args) {
  const at::Device device = apply_device(device_args);
  const ModelConfig config = load_model_config(name);
  const at::ScalarType type = scalar_type_option(dtype).value_or(scalar_type_of(config.dtype));
  const WeightFormat format = weight_format_of(weights);
  const bool has_text = fs::exists(fs::path(name) / "tiktoken.model");
  LoadedModel model{.config = config,
                    .weights = {},
                    .tokenizer = has_text ? Tokenizer::load(name) : nameless_tokenizer(config),
                    .device = device};
  if (fs::exists(fs::path(name) / "config.json")) {
    model.weights = load_weights(config, name, device, type, format);
  } else {
    model.weights = random_weights(config, device, type);
    pack_weights(config, model.weights, format);
  }
  return model;
}

}  // namespace godwit::cli
