#include "godwit/train/setup.h"

#include <ATen/ATen.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "godwit/base/check.h"
#include "godwit/data/tokenizer.h"
#include "godwit/model/config_source.h"
#include "godwit/model/media.h"

namespace godwit {
namespace {

using nlohmann::json;

// Offsets of the special tokens above the ranks, as in the K3 vocabulary (163584 ranks, 256 specials).
constexpr int64_t kSpecials = 256, kBosOffset = 0, kEosOffset = 2, kMediaOffset = 21, kPadOffset = 255;

// Lays `changes` over `target`, objects key by key.
void merge(json& target, const json& changes) {
  for (const auto& [key, value] : changes.items()) {
    if (value.is_object() && target.contains(key) && target[key].is_object())
      merge(target[key], value);
    else
      target[key] = value;
  }
}

// Override keys belong into text_config unless the root or our own object knows them.
json placed(const json& root, const json& overrides) {
  if (!root.contains("text_config")) return overrides;
  json out = json::object();
  for (const auto& [key, value] : overrides.items()) {
    const bool in_root = key == "godwit" || key == "vision_config" || key == "text_config" ||
                         (root.contains(key) && !root["text_config"].contains(key));
    (in_root ? out : out["text_config"])[key] = value;
  }
  return out;
}

// The model is saved with this tokenizer: it must be the one whose ids it learns.
void check_tokenizer(const Recipe& recipe, const data::TokenDataset& dataset) {
  const std::string directory = tokenizer_directory(recipe);
  if (directory.empty()) return;
  check(std::filesystem::is_directory(directory), "tokenizer {}: no such directory", directory);
  check(data::tokenizer_hash(Tokenizer::load(directory)) == dataset.manifest().tokenizer_hash,
        "tokenizer {}: {} was packed with another one", directory, dataset.path().string());
}

}  // namespace

std::string tokenizer_directory(const Recipe& recipe) {
  if (!recipe.tokenizer.empty()) return recipe.tokenizer;
  return std::filesystem::exists(std::filesystem::path(recipe.init) / "tiktoken.model") ? recipe.init : "";
}

RunData open_data(const Recipe& recipe) {
  RunData run;
  for (const DatasetOptions& options : recipe.data) run.train.push_back(data::open_train(options.path));
  for (const std::string& path : recipe.eval.data) {
    auto held = data::open_heldout(path);
    run.held_out.push_back(held ? held : data::open_train(path));
  }
  if (recipe.eval.data.empty()) {
    for (const DatasetOptions& options : recipe.data) {
      if (auto held = data::open_heldout(options.path)) run.held_out.push_back(held);
    }
  }
  check(!run.train.empty(), "the recipe names no data");
  const data::Manifest& first = run.train.front()->manifest();
  for (const auto* list : {&run.train, &run.held_out}) {
    for (const auto& dataset : *list) {
      check(dataset->manifest().tokenizer_hash == first.tokenizer_hash,
            "{} and {} were packed with different tokenizers", run.train.front()->path().string(),
            dataset->path().string());
    }
  }
  for (const auto* list : {&run.train, &run.held_out}) {
    for (const auto& dataset : *list) {
      if (!dataset->has_media()) continue;
      check(!run.processor || *run.processor == dataset->processor(),
            "{}: its pictures are cut otherwise than the others'", dataset->path().string());
      run.processor = dataset->processor();
    }
  }
  run.vocab_size = first.vocab_size;
  check_tokenizer(recipe, *run.train.front());
  return run;
}

ModelConfig resolve_model(const Recipe& recipe, const RunData& data) {
  const std::string& source = recipe.model.name.empty() ? recipe.init : recipe.model.name;
  json root = load_model_json(source);
  const json overrides = json::parse(recipe.model.override_json);
  merge(root, placed(root, overrides));
  if (recipe.init.empty()) {
    check(!overrides.contains("vocab_size") || overrides["vocab_size"] == data.vocab_size,
          "model.override.vocab_size is {}, but the data's tokenizer has {} ids: a new model takes its "
          "vocabulary from the data",
          overrides.value("vocab_size", json()).dump(), data.vocab_size);
    json& text = root.contains("text_config") ? root["text_config"] : root;
    const int64_t ranks = data.vocab_size - kSpecials;
    text["vocab_size"] = data.vocab_size;
    root["bos_token_id"] = ranks + kBosOffset;
    root["eos_token_id"] = ranks + kEosOffset;
    root["pad_token_id"] = ranks + kPadOffset;
    root["media_placeholder_token_id"] = ranks + kMediaOffset;
    if (recipe.train.dtype == TrainDtype::kF32) root["dtype"] = "float32";
  }
  const bool changed = recipe.model.override_json != "{}";
  ModelConfig config = parse_model_config(
      root, model_json_path(source) + (changed ? " with the recipe's model.override" : ""));
  if (data.processor) {
    check(config.vision.has_value(), "{} has no vision_config, and the data have pictures", source);
    check_processor(*config.vision, *data.processor, source);
  }
  check(config.vocab_size >= data.vocab_size, "{} has a vocabulary of {}, the data one of {}", source,
        config.vocab_size, data.vocab_size);
  return config;
}

ModelConfig stage_config(const ModelConfig& config, const StageOptions& stage) {
  ModelConfig out = config;
  if (stage.rope_base > 0) {
    out.mla.rotary = true;
    out.mla.rope_theta = stage.rope_base;
  }
  if (stage.window > 0) out.mla.window = stage.window;
  out.max_position = std::max(out.max_position, stage.context);
  validate(out, "stage " + stage.name);
  return out;
}

std::unique_ptr<data::PackedLoader> stage_loader(const Recipe& recipe, const RunData& run, size_t stage) {
  const StageOptions& options = recipe.stages[stage];
  data::LoaderOptions loader{
      .seed = static_cast<uint64_t>(recipe.seed),
      .stage = stage,
      .sequence_length = options.context,
      .batch_sequences = data::sequences_in_batch(options.batch_tokens, options.context),
      .packing = data::Packing::kConcatenate,
      .mix = {}};
  for (size_t i = 0; i < recipe.data.size(); ++i) {
    const auto named = options.mix.find(recipe.data[i].name);
    const double weight = options.mix.empty()          ? recipe.data[i].weight
                          : named == options.mix.end() ? 0.0
                                                       : named->second;
    if (weight > 0)
      loader.mix.push_back(
          {.dataset = run.train[i], .weight = weight, .min_document_tokens = 0, .continues = std::nullopt});
  }
  check(!loader.mix.empty(), "stage {} mixes no data set", options.name);
  return std::make_unique<data::PackedLoader>(loader);
}

}  // namespace godwit
