#include "godwit/model/convert_config.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "godwit/base/check.h"
#include "godwit/model/config_refused.h"

namespace godwit {
namespace {

using nlohmann::json;
using std::string_view;

// Of Kimi K3's outer object, beside the text model's configuration.
constexpr std::array<string_view, 5> kOuter = {"vision_config", "media_placeholder_token_id",
                                               "image_placeholder", "ignore_index", "auto_map"};
// Where both objects have one of these, the outer one counts (parse_model_config).
constexpr std::array<string_view, 5> kOuterCounts = {"bos_token_id", "eos_token_id", "pad_token_id", "dtype",
                                                     "torch_dtype"};

bool is_in(const auto& list, const std::string& key) {
  return std::ranges::find(list, key) != list.end();
}

const char* dtype_text(io::Dtype dtype) {
  return dtype == io::Dtype::F32 ? "float32" : dtype == io::Dtype::F16 ? "float16" : "bfloat16";
}

// As the released configuration describes its experts.
json quantization_json() {
  const json weights = {{"num_bits", 4},
                        {"type", "float"},
                        {"group_size", 32},
                        {"strategy", "group"},
                        {"symmetric", true},
                        {"dynamic", false},
                        {"observer", "minmax"},
                        {"observer_kwargs", json::object()},
                        {"scale_dtype", "torch.uint8"},
                        {"zp_dtype", nullptr},
                        {"actorder", nullptr},
                        {"block_structure", nullptr}};
  const json group = {{"targets", {"Linear"}},
                      {"weights", weights},
                      {"input_activations", nullptr},
                      {"output_activations", nullptr},
                      {"format", "mxfp4-pack-quantized"}};
  return {{"quant_method", "compressed-tensors"},
          {"format", "mxfp4-pack-quantized"},
          {"quantization_status", "compressed"},
          {"kv_cache_scheme", nullptr},
          {"global_compression_ratio", nullptr},
          {"config_groups", {{"group_0", group}}},
          {"ignore",
           {"re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*", "re:.*vision_tower.*", "re:.*mm_projector.*"}}};
}

// Kimi K3's nested object as Kimi-Linear's flat one.
json flattened(const json& nested, std::vector<std::string>& left_out) {
  json flat = nested.at("text_config");
  for (const auto& [key, value] : nested.items()) {
    if (key == "text_config") continue;
    if (is_in(kOuter, key)) {
      left_out.push_back(key);
    } else if (!flat.contains(key) || (is_in(kOuterCounts, key) && !value.is_null())) {
      flat[key] = value;
    }
  }
  flat["model_type"] = "kimi_linear";
  flat["architectures"] = {"KimiLinearForCausalLM"};
  return flat;
}

json nested(const json& flat, std::vector<std::string>& left_out) {
  json text = flat;
  json root = {{"architectures", {"KimiK3ForConditionalGeneration"}},
               {"model_type", "kimi_k3"},
               {"ignore_index", -100},
               {"dtype", nullptr}};  // set below, as wherever it stands
  for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"}) {
    if (flat.contains(key)) root[key] = flat[key];
  }
  if (flat.contains("godwit")) root["godwit"] = flat["godwit"];
  if (flat.contains("auto_map")) left_out.emplace_back("auto_map");  // it names Kimi-Linear's own code
  text.erase("godwit");
  text.erase("auto_map");
  text["model_type"] = "kimi_linear";
  text["architectures"] = {"KimiLinearForCausalLM"};
  root["text_config"] = std::move(text);
  return root;
}

}  // namespace

ConvertedConfig converted_config(const json& source, const ModelConfig& config, io::Dtype dtype,
                                 bool packed) {
  const bool was_nested = source.contains("text_config"), nest = config.model_type == "kimi_k3";
  ConvertedConfig out{.json = source, .left_out = {}};
  if (was_nested && !nest) out.json = flattened(source, out.left_out);
  if (!was_nested && nest) out.json = nested(source, out.left_out);
  json& root = out.json;
  json& text = nest ? root["text_config"] : root;
  root["dtype"] = dtype_text(dtype);
  for (json* object : {&root, &text}) {
    if (object->contains("torch_dtype")) (*object)["torch_dtype"] = dtype_text(dtype);
    if (object->contains("dtype")) (*object)["dtype"] = dtype_text(dtype);
    if (!packed) object->erase("quantization_config");
  }
  if (packed && !has_quantization(root)) text["quantization_config"] = quantization_json();
  ModelConfig expected = config;
  expected.dtype = dtype_text(dtype);
  check(to_json(parse_model_config(root, "config.json to write")) == to_json(expected),
        "config.json does not say the same model in the layout \"{}\"", config.model_type);
  return out;
}

}  // namespace godwit
