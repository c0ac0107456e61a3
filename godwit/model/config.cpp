#include "godwit/model/config.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "godwit/base/check.h"
#include "godwit/model/config_refused.h"
#include "godwit/model/config_source.h"
#include "godwit/model/presets.h"

namespace godwit {
namespace {

using nlohmann::json;

constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();  // of any integer here; ids are 32 bits
constexpr int64_t kMostLayers = 100000;

// Reads typed keys of one JSON object; absent or null keys take the default.
class Reader {
 public:
  Reader(const json& object, std::string where) : object_(object), where_(std::move(where)) {
    check(object.is_object(), "{}: expected an object, got {}", where_, object.type_name());
  }

  bool has(const char* key) const { return object_.contains(key) && !object_.at(key).is_null(); }

  int64_t integer(const char* key, int64_t fallback) const {
    if (!has(key)) return fallback;
    const json& value = object_.at(key);
    const bool whole =
        value.is_number() && value.get<double>() == std::floor(value.get<double>());  // 1e5 is one
    check(whole, "{}: '{}' must be an integer, got {}", where_, key, value.dump());
    check(std::abs(value.get<double>()) <= kLargest, "{}: '{}' must be at most {}, got {}", where_, key,
          kLargest, value.dump());
    return value.is_number_integer() ? value.get<int64_t>() : static_cast<int64_t>(value.get<double>());
  }
  int64_t not_negative(const char* key, int64_t fallback = 0) const {
    const int64_t value = integer(key, fallback);
    check(value >= 0, "{}: '{}' must not be negative, got {}", where_, key, value);
    return value;
  }
  int64_t positive(const char* key, int64_t fallback = 0) const {
    const int64_t value = integer(key, fallback);
    check(value > 0 || has(key), "{}: '{}' is missing", where_, key);
    check(value > 0, "{}: '{}' must be positive, got {}", where_, key, value);
    return value;
  }
  double number(const char* key, double fallback) const {
    if (!has(key)) return fallback;
    check(object_.at(key).is_number(), "{}: '{}' must be a number, got {}", where_, key,
          object_.at(key).dump());
    const double value = object_.at(key).get<double>();
    check(std::abs(value) <= std::numeric_limits<float>::max(), "{}: '{}' is {}, more than a float holds",
          where_, key, object_.at(key).dump());
    return value;
  }
  double not_negative_number(const char* key, double fallback) const {
    const double value = number(key, fallback);
    check(value >= 0, "{}: '{}' must not be negative, got {}", where_, key, value);
    return value;
  }
  bool boolean(const char* key, bool fallback) const {
    if (!has(key)) return fallback;
    check(object_.at(key).is_boolean(), "{}: '{}' must be true or false, got {}", where_, key,
          object_.at(key).dump());
    return object_.at(key).get<bool>();
  }
  std::string string(const char* key, const std::string& fallback) const {
    if (!has(key)) return fallback;
    check(object_.at(key).is_string(), "{}: '{}' must be a string, got {}", where_, key,
          object_.at(key).dump());
    return object_.at(key).get<std::string>();
  }
  Reader object(const char* key) const {
    check(has(key), "{}: '{}' is missing", where_, key);
    return Reader(object_.at(key), where_ + ": " + key);
  }
  std::vector<int64_t> integers(const char* key) const {
    check(has(key) && object_.at(key).is_array(), "{}: '{}' must be a list of integers", where_, key);
    std::vector<int64_t> values;
    for (const json& item : object_.at(key)) {
      check(item.is_number_integer(), "{}: '{}' must be a list of integers, found {}", where_, key,
            item.dump());
      values.push_back(item.get<int64_t>());
    }
    return values;
  }
  std::vector<std::string> strings(const char* key) const {
    check(has(key) && object_.at(key).is_array(), "{}: '{}' must be a list of strings", where_, key);
    std::vector<std::string> values;
    for (const json& item : object_.at(key)) {
      check(item.is_string(), "{}: '{}' must be a list of strings, found {}", where_, key, item.dump());
      values.push_back(item.get<std::string>());
    }
    return values;
  }
  // Our own objects are strict: a key that is not in `known` is an error.
  void only(const std::set<std::string>& known) const {
    for (const auto& [key, value] : object_.items())
      check(known.contains(key), "{}: unknown key '{}'", where_, key);
  }
  const std::string& where() const { return where_; }

 private:
  const json& object_;
  std::string where_;
};

constexpr int64_t kMostExperts = 65536;  // every expert has names of its own in a checkpoint

void read_layers(const Reader& linear, ModelConfig& config) {
  config.kda_layer.assign(config.layers, false);
  for (const int64_t layer : linear.integers("kda_layers")) {  // 1-based in the file
    check(layer >= 1 && layer <= config.layers, "{}: 'kda_layers' holds {}, expected 1 to {}", linear.where(),
          layer, config.layers);
    check(!config.kda_layer[layer - 1], "{}: 'kda_layers' holds {} twice", linear.where(), layer);
    config.kda_layer[layer - 1] = true;
  }
  if (!linear.has("full_attn_layers")) return;
  for (const int64_t layer : linear.integers("full_attn_layers")) {
    check(layer >= 1 && layer <= config.layers, "{}: 'full_attn_layers' holds {}, expected 1 to {}",
          linear.where(), layer, config.layers);
    check(!config.kda_layer[layer - 1], "{}: layer {} is in 'kda_layers' and in 'full_attn_layers'",
          linear.where(), layer);
  }
}

// transformers' own keys, which stand alone where linear_attn_config is left out.
void read_layer_types(const Reader& text, ModelConfig& config) {
  if (!text.has("layer_types")) return;
  const std::vector<std::string> types = text.strings("layer_types");
  check(static_cast<int64_t>(types.size()) == config.layers, "{}: 'layer_types' holds {} layers, expected {}",
        text.where(), types.size(), config.layers);
  bool any = false;
  for (size_t layer = 0; layer < types.size(); ++layer) {
    const bool linear = types[layer] == "linear_attention";
    check(linear || types[layer] == "full_attention",
          "{}: 'layer_types' must hold \"linear_attention\" or \"full_attention\", got \"{}\"", text.where(),
          types[layer]);
    config.kda_layer[layer] = linear;
    any = any || linear;
  }
  if (!any) return;
  config.kda.heads = text.positive("linear_num_heads");
  config.kda.head_dim = text.positive("linear_head_dim");
  config.kda.conv_kernel = text.positive("linear_conv_kernel_dim", 4);
}

void read_attention(const Reader& text, ModelConfig& config) {
  MlaConfig& mla = config.mla;
  mla.heads = text.positive("num_attention_heads");
  const int64_t key_heads = text.positive("num_key_value_heads", mla.heads);
  check(key_heads == mla.heads,
        "{}: 'num_key_value_heads' must be num_attention_heads, {}: every head of latent attention has keys "
        "and "
        "values of its own; got {}",
        text.where(), mla.heads, key_heads);
  mla.q_lora_rank = text.not_negative("q_lora_rank");
  mla.kv_lora_rank = text.not_negative("kv_lora_rank");
  mla.nope_dim = text.not_negative("qk_nope_head_dim");
  mla.rope_dim = text.not_negative("qk_rope_head_dim");
  mla.v_dim = text.not_negative("v_head_dim");
  mla.gate = text.boolean("mla_use_output_gate", false) ? MlaGate::kOutput : MlaGate::kNone;
  mla.rope_theta = text.number("rope_theta", 10000.0);
  mla.rotary = !text.boolean("mla_use_nope", true);
  config.kda_layer.assign(config.layers, false);
  if (!text.has("linear_attn_config")) return read_layer_types(text, config);
  const Reader linear = text.object("linear_attn_config");
  read_layers(linear, config);
  config.kda.heads = linear.positive("num_heads");
  config.kda.head_dim = linear.positive("head_dim");
  config.kda.conv_kernel = linear.positive("short_conv_kernel_size", 4);
  config.kda.full_rank_gate = linear.boolean("use_full_rank_gate", false);
  config.kda.gate_lower_bound = linear.number("gate_lower_bound", 0.0);
}

// What a configuration may ask for and no layer here does.
void refuse_unsupported(const Reader& text) {
  const int64_t next = text.not_negative("num_nextn_predict_layers");
  check(next == 0,
        "{}: 'num_nextn_predict_layers' must be 0, got {}: there are no layers that predict further tokens",
        text.where(), next);
}

void read_moe(const Reader& text, ModelConfig& config) {
  MoeConfig& moe = config.moe;
  moe.experts = text.not_negative("num_experts");
  if (moe.experts == 0) return;
  moe.experts_per_token = text.positive("num_experts_per_token", text.integer("num_experts_per_tok", 0));
  moe.shared_experts = text.not_negative("num_shared_experts");
  moe.inner = text.positive("moe_intermediate_size");
  moe.latent = text.not_negative("routed_expert_hidden_size");
  moe.latent_norm = text.boolean("latent_moe_use_norm", false);
  moe.renormalize = text.boolean("moe_renormalize", true);
  moe.scale = text.number("routed_scaling_factor", 1.0);
  moe.groups = text.positive("num_expert_group", 1);
  moe.topk_groups = text.positive("topk_group", 1);
  moe.first_dense = text.not_negative("first_k_dense_replace");
  moe.layer_freq = text.positive("moe_layer_freq", 1);
  const std::string activation = text.string("moe_router_activation_func", "sigmoid");
  check(activation == "sigmoid", "{}: 'moe_router_activation_func' must be \"sigmoid\", got \"{}\"",
        text.where(), activation);
}

// Godwit's options, where the two articles that describe the architecture leave room.
void read_options(const Reader& options, ModelConfig& config) {
  options.only({"router_input", "mla_gate", "mla_local_window", "mla_window", "attn_res", "vision_time"});
  const std::string input = options.string("router_input", "hidden");
  check(input == "hidden" || input == "latent",
        "{}: 'router_input' must be \"hidden\" or \"latent\", got \"{}\"", options.where(), input);
  config.moe.router_input = input == "latent" ? RouterInput::kLatent : RouterInput::kHidden;
  if (options.has("mla_gate")) {
    const std::string gate = options.string("mla_gate", "");
    if (gate == "none")
      config.mla.gate = MlaGate::kNone;
    else if (gate == "output")
      config.mla.gate = MlaGate::kOutput;
    else if (gate == "local_global")
      config.mla.gate = MlaGate::kLocalGlobal;
    else
      fail("{}: 'mla_gate' must be \"none\", \"output\" or \"local_global\", got \"{}\"", options.where(),
           gate);
  }
  config.mla.local_window =
      options.not_negative("mla_local_window", config.mla.gate == MlaGate::kLocalGlobal ? 64 : 0);
  config.mla.window = options.not_negative("mla_window");
  const std::string kind =
      options.string("attn_res", config.attn_res == AttnResKind::kNone ? "none" : "block");
  if (kind == "none")
    config.attn_res = AttnResKind::kNone;
  else if (kind == "full")
    config.attn_res = AttnResKind::kFull;
  else if (kind == "block")
    config.attn_res = AttnResKind::kBlock;
  else
    fail("{}: 'attn_res' must be \"none\", \"block\" or \"full\", got \"{}\"", options.where(), kind);
  const std::string time = options.string("vision_time", "joint");
  check(time == "joint" || time == "factorised",
        "{}: 'vision_time' must be \"joint\" or \"factorised\", got \"{}\"", options.where(), time);
  if (config.vision) config.vision->time = time == "joint" ? VisionTime::kJoint : VisionTime::kFactorised;
}

VisionConfig read_vision(const Reader& vision) {
  VisionConfig out;
  out.patch_size = vision.positive("patch_size", 14);
  out.pos_emb_height = vision.positive("init_pos_emb_height", 64);
  out.pos_emb_width = vision.positive("init_pos_emb_width", 64);
  out.pos_emb_time = vision.positive("init_pos_emb_time", 4);
  const std::string interpolation = vision.string("pos_emb_interpolation_mode", "bilinear");
  check(interpolation == "bilinear" || interpolation == "bicubic",
        "{}: 'pos_emb_interpolation_mode' must be \"bilinear\" or \"bicubic\", got \"{}\"", vision.where(),
        interpolation);
  out.pos_emb_bicubic = interpolation == "bicubic";
  out.layers = vision.positive("vt_num_hidden_layers");
  out.hidden = vision.positive("vt_hidden_size");
  out.intermediate = vision.positive("vt_intermediate_size");
  out.heads = vision.positive("vt_num_attention_heads");
  out.qkv_hidden = vision.positive("qkv_hidden_size", out.hidden);
  if (vision.has("merge_kernel_size")) {
    const auto kernel = vision.integers("merge_kernel_size");
    check(kernel.size() == 2 && kernel[0] > 0 && kernel[1] > 0,
          "{}: 'merge_kernel_size' must be two positive integers", vision.where());
    out.merge_height = kernel[0];
    out.merge_width = kernel[1];
  }
  out.projector_eps = vision.number("projector_ln_eps", 1e-5);
  return out;
}

json options_json(const ModelConfig& config) {
  static const char* const kGate[] = {"none", "output", "local_global"};
  static const char* const kRes[] = {"none", "block", "full"};
  json options = {{"router_input", config.moe.router_input == RouterInput::kLatent ? "latent" : "hidden"},
                  {"mla_gate", kGate[static_cast<int>(config.mla.gate)]},
                  {"attn_res", kRes[static_cast<int>(config.attn_res)]}};
  if (config.mla.local_window > 0) options["mla_local_window"] = config.mla.local_window;
  if (config.mla.window > 0) options["mla_window"] = config.mla.window;
  if (config.vision && config.vision->time == VisionTime::kFactorised) options["vision_time"] = "factorised";
  return options;
}

json linear_attn_json(const ModelConfig& config) {
  std::vector<int64_t> kda_layers, full_layers;
  for (int64_t layer = 0; layer < config.layers; ++layer)
    (config.kda_layer[layer] ? kda_layers : full_layers).push_back(layer + 1);
  json out = {{"kda_layers", kda_layers},
              {"full_attn_layers", full_layers},
              {"num_heads", config.kda.heads},
              {"head_dim", config.kda.head_dim},
              {"short_conv_kernel_size", config.kda.conv_kernel},
              {"use_full_rank_gate", config.kda.full_rank_gate}};
  if (config.kda.gate_lower_bound < 0) out["gate_lower_bound"] = config.kda.gate_lower_bound;
  return out;
}

json text_json(const ModelConfig& c) {
  const auto nonzero = [](int64_t value) { return value > 0 ? json(value) : json(nullptr); };
  const auto id = [](int64_t value) { return value >= 0 ? json(value) : json(nullptr); };
  json text = {{"model_type", "kimi_linear"},
               {"architectures", {"KimiLinearForCausalLM"}},
               {"vocab_size", c.vocab_size},
               {"hidden_size", c.hidden},
               {"num_hidden_layers", c.layers},
               {"intermediate_size", c.intermediate},
               {"num_attention_heads", c.mla.heads},
               {"num_key_value_heads", c.mla.heads},
               {"hidden_act", c.situ ? "situ" : "silu"},
               {"rms_norm_eps", c.rms_norm_eps},
               {"initializer_range", c.initializer_range},
               {"tie_word_embeddings", c.tie_embeddings},
               {"max_position_embeddings", nonzero(c.max_position)},
               {"q_lora_rank", nonzero(c.mla.q_lora_rank)},
               {"kv_lora_rank", c.mla.kv_lora_rank},
               {"qk_nope_head_dim", c.mla.nope_dim},
               {"qk_rope_head_dim", c.mla.rope_dim},
               {"v_head_dim", c.mla.v_dim},
               {"mla_use_nope", !c.mla.rotary},
               {"mla_use_output_gate", c.mla.gate == MlaGate::kOutput},
               {"rope_theta", c.mla.rope_theta},
               {"bos_token_id", id(c.bos_id)},
               {"eos_token_id", id(c.eos_id)},
               {"pad_token_id", id(c.pad_id)},
               {"num_nextn_predict_layers", 0},
               {"dtype", c.dtype}};
  if (c.situ) {
    text["activation_situ_beta"] = c.situ_beta;
    text["activation_situ_linear_beta"] = c.situ_linear_beta > 0 ? json(c.situ_linear_beta) : json(nullptr);
  }
  if (c.attn_res == AttnResKind::kBlock) text["attn_res_block_size"] = c.attn_res_block;
  if (c.kda.heads > 0) text["linear_attn_config"] = linear_attn_json(c);
  if (c.moe.experts > 0) {
    const MoeConfig& m = c.moe;
    text.update({{"num_experts", m.experts},
                 {"num_experts_per_token", m.experts_per_token},
                 {"num_shared_experts", m.shared_experts},
                 {"moe_intermediate_size", m.inner},
                 {"routed_expert_hidden_size", nonzero(m.latent)},
                 {"latent_moe_use_norm", m.latent_norm},
                 {"moe_router_activation_func", "sigmoid"},
                 {"moe_renormalize", m.renormalize},
                 {"routed_scaling_factor", m.scale},
                 {"topk_method", "noaux_tc"},
                 {"use_grouped_topk", true},
                 {"num_expert_group", m.groups},
                 {"topk_group", m.topk_groups},
                 {"first_k_dense_replace", m.first_dense},
                 {"moe_layer_freq", m.layer_freq}});
  }
  return text;
}

json vision_json(const VisionConfig& v, int64_t text_hidden) {
  return {{"patch_size", v.patch_size},
          {"init_pos_emb_height", v.pos_emb_height},
          {"init_pos_emb_width", v.pos_emb_width},
          {"init_pos_emb_time", v.pos_emb_time},
          {"pos_emb_interpolation_mode", v.pos_emb_bicubic ? "bicubic" : "bilinear"},
          {"vt_num_hidden_layers", v.layers},
          {"vt_hidden_size", v.hidden},
          {"vt_intermediate_size", v.intermediate},
          {"vt_num_attention_heads", v.heads},
          {"qkv_hidden_size", v.qkv_hidden},
          {"merge_kernel_size", {v.merge_height, v.merge_width}},
          {"projector_ln_eps", v.projector_eps},
          {"text_hidden_size", text_hidden}};
}

void validate_vision(const VisionConfig& v, const std::string& where) {
  check(v.qkv_hidden % v.heads == 0 && v.head_dim() % 4 == 0,
        "{}: vision: qkv_hidden_size {} must be {} heads of a width that is a multiple of 4", where,
        v.qkv_hidden, v.heads);
  check(v.hidden % 2 == 0, "{}: vision: vt_hidden_size must be even, got {}", where, v.hidden);
  check(v.projector_eps > 0, "{}: vision: projector_ln_eps must be positive, got {}", where, v.projector_eps);
}

}  // namespace

ModelConfig parse_model_config(const json& root_json, const std::string& where) {
  const Reader root(root_json, where);
  ModelConfig config;
  const bool nested = root.has("text_config");
  config.model_type = root.string("model_type", nested ? "kimi_k3" : "kimi_linear");
  check(config.model_type == "kimi_k3" || config.model_type == "kimi_linear",
        "{}: 'model_type' must be \"kimi_k3\" or \"kimi_linear\", got \"{}\"", where, config.model_type);
  check(nested == (config.model_type == "kimi_k3"), "{}: a \"{}\" configuration {} a nested 'text_config'",
        where, config.model_type, nested ? "has not" : "needs");
  const Reader text = nested ? root.object("text_config") : root;
  refuse_other_models(root_json, where);
  config.dtype = root.string("dtype", root.string("torch_dtype", text.string("dtype", "bfloat16")));
  check(config.dtype == "bfloat16" || config.dtype == "float32" || config.dtype == "float16",
        "{}: 'dtype' must be \"bfloat16\", \"float32\" or \"float16\", got \"{}\"", where, config.dtype);
  config.vocab_size = text.positive("vocab_size");
  config.hidden = text.positive("hidden_size");
  config.layers = text.positive("num_hidden_layers");
  check(config.layers <= kMostLayers, "{}: 'num_hidden_layers' must be at most {}, got {}", text.where(),
        kMostLayers, config.layers);
  config.intermediate = text.positive("intermediate_size");
  const std::string act = text.string("hidden_act", "silu");
  check(act == "situ" || act == "silu", "{}: 'hidden_act' must be \"situ\" or \"silu\", got \"{}\"", where,
        act);
  config.situ = act == "situ";
  config.situ_beta = text.not_negative_number("activation_situ_beta", 0.0);
  if (config.situ_beta == 0.0) config.situ_beta = 1.0;
  config.situ_linear_beta = text.not_negative_number("activation_situ_linear_beta", 0.0);
  config.rms_norm_eps = text.number("rms_norm_eps", 1e-6);
  config.initializer_range = text.not_negative_number("initializer_range", 0.02);
  config.tie_embeddings = text.boolean("tie_word_embeddings", root.boolean("tie_word_embeddings", false));
  config.max_position = text.integer("max_position_embeddings", text.integer("model_max_length", 0));
  config.bos_id = root.integer("bos_token_id", text.integer("bos_token_id", -1));
  config.eos_id = root.integer("eos_token_id", text.integer("eos_token_id", -1));
  config.pad_id = root.integer("pad_token_id", text.integer("pad_token_id", -1));
  config.media_id = root.integer("media_placeholder_token_id", -1);
  read_attention(text, config);
  refuse_unsupported(text);
  read_moe(text, config);
  config.attn_res_block = text.not_negative("attn_res_block_size");
  config.attn_res = config.attn_res_block > 0 ? AttnResKind::kBlock : AttnResKind::kNone;
  if (root.has("vision_config")) config.vision = read_vision(root.object("vision_config"));
  if (root.has("godwit")) read_options(root.object("godwit"), config);
  validate(config, where);
  refuse_contradictions(root_json, config, where);
  return config;
}

void validate(const ModelConfig& c, const std::string& where) {
  if (c.vision) validate_vision(*c.vision, where);
  const bool any_kda = std::find(c.kda_layer.begin(), c.kda_layer.end(), true) != c.kda_layer.end();
  const bool any_mla = std::find(c.kda_layer.begin(), c.kda_layer.end(), false) != c.kda_layer.end();
  if (any_kda) {
    check(c.kda.heads > 0 && c.kda.head_dim > 0,
          "{}: KDA layers need 'linear_attn_config' with num_heads and head_dim", where);
    check(c.kda.gate_lower_bound <= 0, "{}: 'gate_lower_bound' must be negative, got {}", where,
          c.kda.gate_lower_bound);
    check(c.kda.gate_lower_bound >= -5.0,
          "{}: 'gate_lower_bound' must be at least -5 (16 tokens must fit fp32), got {}", where,
          c.kda.gate_lower_bound);
  }
  if (any_mla) {
    check(c.mla.kv_lora_rank > 0 && c.mla.nope_dim > 0 && c.mla.v_dim > 0 && c.mla.rope_dim >= 0 &&
              c.mla.q_lora_rank >= 0,
          "{}: MLA layers need positive kv_lora_rank, qk_nope_head_dim and v_head_dim", where);
    check(c.mla.rope_theta > 0 || !c.mla.rotary, "{}: 'rope_theta' must be positive, got {}", where,
          c.mla.rope_theta);
    check(!c.mla.rotary || (c.mla.rope_dim > 0 && c.mla.rope_dim % 2 == 0),
          "{}: rotation needs an even qk_rope_head_dim, got {}", where, c.mla.rope_dim);
    check(c.mla.gate != MlaGate::kLocalGlobal || c.mla.local_window > 0,
          "{}: mla_gate \"local_global\" needs mla_local_window > 0", where);
    check(c.mla.window >= 0, "{}: 'mla_window' must not be negative, got {}", where, c.mla.window);
  }
  if (c.moe.experts > 0) {
    check(c.moe.experts_per_token >= 1 && c.moe.experts_per_token <= c.moe.experts,
          "{}: 'num_experts_per_token' must be 1 to {}, got {}", where, c.moe.experts,
          c.moe.experts_per_token);
    check(c.moe.experts <= kMostExperts, "{}: 'num_experts' must be at most {}, got {}", where, kMostExperts,
          c.moe.experts);
    check(c.moe.experts % c.moe.groups == 0, "{}: 'num_expert_group' {} does not divide num_experts {}",
          where, c.moe.groups, c.moe.experts);
    check(c.moe.topk_groups <= c.moe.groups &&
              c.moe.experts / c.moe.groups * c.moe.topk_groups >= c.moe.experts_per_token,
          "{}: 'topk_group' {} of {} groups leaves too few experts for top-{}", where, c.moe.topk_groups,
          c.moe.groups, c.moe.experts_per_token);
    check(c.moe.scale > 0, "{}: 'routed_scaling_factor' must be positive, got {}", where, c.moe.scale);
    check(c.moe.router_input == RouterInput::kHidden || c.moe.latent > 0,
          "{}: router_input \"latent\" needs routed_expert_hidden_size", where);
    check(!c.moe.latent_norm || c.moe.latent > 0, "{}: 'latent_moe_use_norm' needs routed_expert_hidden_size",
          where);
  }
  check(c.attn_res != AttnResKind::kBlock || c.attn_res_block > 0,
        "{}: attn_res \"block\" needs attn_res_block_size > 0", where);
  check(c.rms_norm_eps > 0, "{}: 'rms_norm_eps' must be positive, got {}", where, c.rms_norm_eps);
  for (const int64_t id : {c.bos_id, c.eos_id, c.pad_id, c.media_id}) {
    check(id < c.vocab_size, "{}: a special token id {} lies outside the vocabulary of {}", where, id,
          c.vocab_size);
  }
}

json to_json(const ModelConfig& config) {
  json text = text_json(config);
  if (config.model_type == "kimi_linear") {
    text["godwit"] = options_json(config);
    return text;
  }
  json root = {{"architectures", {"KimiK3ForConditionalGeneration"}},
               {"model_type", config.model_type},
               {"dtype", config.dtype},
               {"bos_token_id", text["bos_token_id"]},
               {"eos_token_id", text["eos_token_id"]},
               {"pad_token_id", text["pad_token_id"]},
               {"media_placeholder_token_id", config.media_id >= 0 ? json(config.media_id) : json(nullptr)},
               {"ignore_index", -100},
               {"tie_word_embeddings", config.tie_embeddings},
               {"text_config", text},
               {"godwit", options_json(config)}};
  if (config.vision) root["vision_config"] = vision_json(*config.vision, config.hidden);
  return root;
}

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const Preset& preset : presets()) names.emplace_back(preset.name);
  return names;
}

json preset_json(const std::string& name) {
  std::string names;
  for (const Preset& preset : presets()) {
    if (preset.name == name) return json::parse(preset.text);
    names += (names.empty() ? "" : ", ") + std::string(preset.name);
  }
  fail("no model '{}': expected a directory with config.json, a config.json, or a preset ({})", name, names);
}

std::string model_json_path(const std::string& model) {
  std::error_code ignored;
  return std::filesystem::is_directory(model, ignored)
             ? (std::filesystem::path(model) / "config.json").string()
             : model;
}

json load_model_json(const std::string& model) {
  namespace fs = std::filesystem;
  const fs::path path = model_json_path(model);
  std::error_code ignored;
  if (path == model && !fs::is_regular_file(path, ignored)) return preset_json(model);
  check(!fs::exists(path, ignored) || fs::is_regular_file(path, ignored), "{}: not a regular file",
        path.string());
  std::ifstream file(path);
  check(file.good(), "{}: cannot be opened", path.string());
  try {
    return json::parse(file);
  } catch (const json::exception& e) {
    fail("{}: not valid JSON: {}", path.string(), e.what());
  }
}

ModelConfig load_model_config(const std::string& model) {
  return parse_model_config(load_model_json(model), model_json_path(model));
}

}  // namespace godwit
