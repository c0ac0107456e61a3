#include "godwit/model/config_refused.h"

#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "godwit/base/check.h"

namespace godwit {
namespace {

using nlohmann::json;

// The key's value; null where there is none.
json value_of(const json& object, const char* key) {
  return object.is_object() && object.contains(key) ? object[key] : json();
}

const json& text_of(const json& root) {
  return root.contains("text_config") && root["text_config"].is_object() ? root["text_config"] : root;
}

void expect(const json& object, const std::string& where, const char* key, const json& known) {
  const json found = value_of(object, key);
  check(found == known, "{}: '{}' is {}, and only {} is known", where, key, found.dump(), known.dump());
}

// The same where the key may be absent or null.
void expect_if_there(const json& object, const std::string& where,
                     const std::vector<std::pair<const char*, json>>& known) {
  for (const auto& [key, value] : known) {
    if (!value_of(object, key).is_null()) expect(object, where, key, value);
  }
}

// Packed experts are read as MXFP4 and as nothing else.
void refuse_other_quantisations(const json& root, const std::string& where) {
  for (const json* at : {&root, &text_of(root)}) {
    const json found = value_of(*at, "quantization_config");
    if (found.is_null()) continue;
    const std::string here = where + ": quantization_config";
    check(found.is_object(), "{}: expected an object, got {}", here, found.type_name());
    expect(found, here, "quant_method", "compressed-tensors");
    expect(found, here, "format", "mxfp4-pack-quantized");
    const json groups = value_of(found, "config_groups");
    if (groups.is_null()) continue;
    check(groups.is_object(), "{}: 'config_groups' must be an object, got {}", here, groups.type_name());
    for (const auto& [name, group] : groups.items()) {
      const json weights = value_of(group, "weights");
      expect(weights, here, "num_bits", 4);
      expect(weights, here, "type", "float");
      expect(weights, here, "group_size", 32);
      expect_if_there(weights, here,
                      {{"symmetric", true}, {"strategy", "group"}, {"scale_dtype", "torch.uint8"}});
      expect_if_there(group, here, {{"format", "mxfp4-pack-quantized"}});
    }
  }
}

// A rotation of another kind than by rope_theta alone.
void refuse_other_rotations(const json& text, const std::string& where) {
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const json found = value_of(text, key);
    if (found.is_null()) continue;
    check(found.is_object(), "{}: '{}' must be an object, got {}", where, key, found.type_name());
    for (const char* type : {"rope_type", "type"}) {
      if (!value_of(found, type).is_null()) expect(found, where + ": " + key, type, "default");
    }
    const bool plain = std::string(key) == "rope_parameters" || !value_of(found, "rope_type").is_null() ||
                       !value_of(found, "type").is_null();
    check(plain, "{}: '{}' is {}, and positions are not scaled here", where, key, found.dump());
    expect_if_there(found, where + ": " + key, {{"factor", 1}, {"partial_rotary_factor", 1}});
    for (const auto& [name, value] : found.items())
      check(!value.is_object(), "{}: '{}' differs by layers ({}), and there is one rotation", where, key,
            name);
  }
}

void refuse_other_layers(const json& text, const std::string& where) {
  // What transformers, DeepSeek's and flash-linear-attention's configurations call such things.
  expect_if_there(text, where,
                  {{"topk_method", "noaux_tc"},
                   {"scoring_func", "sigmoid"},
                   {"attention_bias", false},
                   {"mlp_bias", false},
                   {"attention_dropout", 0},
                   {"use_sliding_window", false},
                   {"partial_rotary_factor", 1},
                   {"rope_interleave", true}});
  for (const char* key : {"sliding_window", "attn_logit_softcapping", "final_logit_softcapping",
                          "logits_soft_cap", "swiglu_limit"}) {
    const json found = value_of(text, key);
    check(found.is_null(), "{}: '{}' is {}, and no layer here has one", where, key, found.dump());
  }
  expect_if_there(value_of(text, "linear_attn_config"), where + ": linear_attn_config",
                  {{"allow_neg_eigval", false}, {"use_short_conv", true}, {"expand_v", 1}});
}

void refuse_other_towers(const json& vision, const std::string& where) {
  expect_if_there(vision, where,
                  {{"pos_emb_type", "divided_fixed"},
                   {"norm_type", "rmsnorm"},
                   {"mlp_type", "mlp2"},
                   {"activation_func", "gelu_pytorch_tanh"},
                   {"attn_bias", false},
                   {"linear_bias", false},
                   {"patch_embed_proj_bias", false},
                   {"merge_type", "sd2_tpool"},
                   {"mm_projector_type", "patchmergerv2"},
                   {"projector_hidden_act", "gelu"}});
}

}  // namespace

bool has_quantization(const json& root) {
  return !value_of(root, "quantization_config").is_null() ||
         !value_of(text_of(root), "quantization_config").is_null();
}

void refuse_other_models(const json& root, const std::string& where) {
  refuse_other_quantisations(root, where);
  const json& text = text_of(root);
  const bool nested = &text != &root;
  const std::string here = nested ? where + ": text_config" : where;
  if (nested) {
    expect_if_there(text, here, {{"model_type", "kimi_linear"}});
    refuse_other_layers(root, where);
    refuse_other_rotations(root, where);
  }
  refuse_other_layers(text, here);
  refuse_other_rotations(text, here);
  refuse_other_towers(value_of(root, "vision_config"), where + ": vision_config");
}

void refuse_contradictions(const json& root, const ModelConfig& config, const std::string& where) {
  const json& text = text_of(root);
  const std::string here = &text != &root ? where + ": text_config" : where;
  const auto same = [&](const char* key, const json& value, const char* of) {
    const json found = value_of(text, key);
    check(found.is_null() || found == value, "{}: '{}' is {}, and {} makes it {}", here, key, found.dump(),
          of, value.dump());
  };
  json attention = json::array(), mlp = json::array();
  bool any_kda = false;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    attention.push_back(config.kda_layer[layer] ? "linear_attention" : "full_attention");
    mlp.push_back(config.is_moe(layer) ? "sparse" : "dense");
    any_kda = any_kda || config.kda_layer[layer];
  }
  same("layer_types", attention, "linear_attn_config");
  same("mlp_layer_types", mlp, "first_k_dense_replace with moe_layer_freq");
  if (any_kda) {
    same("linear_num_heads", config.kda.heads, "linear_attn_config");
    same("linear_head_dim", config.kda.head_dim, "linear_attn_config");
    same("linear_conv_kernel_dim", config.kda.conv_kernel, "linear_attn_config");
  }
  same("qk_head_dim", config.mla.qk_dim(), "qk_nope_head_dim + qk_rope_head_dim");
  if (config.mla.rotary) {
    const json base = value_of(value_of(text, "rope_parameters"), "rope_theta");
    check(base.is_null() || base == json(config.mla.rope_theta),
          "{}: 'rope_parameters' has the base {}, rope_theta is {}", here, base.dump(),
          config.mla.rope_theta);
  }
  if (config.moe.experts > 0) {
    same("norm_topk_prob", config.moe.renormalize, "moe_renormalize");
    same("n_routed_experts", config.moe.experts, "num_experts");
    same("n_group", config.moe.groups, "num_expert_group");
    same("num_experts_per_tok", config.moe.experts_per_token, "num_experts_per_token");
    check(config.moe.groups == 1 || value_of(text, "use_grouped_topk") != json(false),
          "{}: 'use_grouped_topk' is false, and num_expert_group is {}", here, config.moe.groups);
  }
  if (!config.vision) return;
  const json& vision = root["vision_config"];
  const auto fits = [&](const char* key, int64_t value, const char* of) {
    const json found = value_of(vision, key);
    check(found.is_null() || found == json(value), "{}: vision_config: '{}' is {}, and {} is {}", where, key,
          found.dump(), of, value);
  };
  fits("mm_hidden_size", config.vision->hidden, "vt_hidden_size");
  fits("text_hidden_size", config.hidden, "hidden_size");
}

}  // namespace godwit
