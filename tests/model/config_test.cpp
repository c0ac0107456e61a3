#include "godwit/model/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/stat.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "godwit/base/check.h"
#include "godwit/model/config_keys.h"
#include "godwit/model/weights.h"
#include "tests/model/tiny.h"
#include "tests/support/files.h"

namespace godwit {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

std::string error_of(const json& value) {
  try {
    parse_model_config(value, "config.json");
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

TEST(Config, KimiK3AsReleased) {
  const ModelConfig c = load_model_config("kimi-k3");
  EXPECT_EQ(c.layers, 93);
  EXPECT_EQ(std::count(c.kda_layer.begin(), c.kda_layer.end(), true), 69);
  for (const int64_t mla : {3, 7, 87, 91, 92})
    EXPECT_FALSE(c.kda_layer[mla]);  // the file's lists are 1-based
  EXPECT_TRUE(c.kda_layer[0]);
  EXPECT_EQ(c.attn_res_block, 12);
  EXPECT_EQ(c.kda.gate_lower_bound, -5.0);
  EXPECT_FALSE(c.is_moe(0));
  EXPECT_TRUE(c.is_moe(1));
  EXPECT_EQ(c.mla.gate, MlaGate::kOutput);
  EXPECT_FALSE(c.mla.rotary);
  ASSERT_TRUE(c.vision.has_value());
  EXPECT_EQ(c.vision->hidden, 1024);
}

TEST(Config, KimiLinearAsReleased) {
  const ModelConfig c = load_model_config("kimi-linear-48b");
  EXPECT_EQ(c.prefix(), "");
  EXPECT_EQ(c.attn_res, AttnResKind::kNone);
  EXPECT_EQ(c.moe.latent, 0);
  EXPECT_EQ(c.mla.q_lora_rank, 0);
  EXPECT_EQ(c.kda.gate_lower_bound, 0.0);
  EXPECT_FALSE(c.kda.full_rank_gate);
  EXPECT_EQ(c.mla.gate, MlaGate::kNone);
  EXPECT_DOUBLE_EQ(c.moe.scale, 2.446);
  EXPECT_EQ(c.glu_gate_beta(), 0.0);
}

TEST(Config, RoundTripsThroughJson) {
  for (const std::string& name : preset_names()) {
    const ModelConfig c = load_model_config(name);
    const json once = to_json(c);
    EXPECT_EQ(once, to_json(parse_model_config(once, name))) << name;
  }
  for (const auto& [name, c] : test::tiny_variants()) {
    const json once = to_json(c);
    const ModelConfig again = parse_model_config(once, name);
    EXPECT_EQ(once, to_json(again)) << name;
    EXPECT_EQ(again.mla.gate, c.mla.gate) << name;
    EXPECT_EQ(again.attn_res, c.attn_res) << name;
  }
}

TEST(Config, KeysThatNoConfigurationHas) {
  EXPECT_EQ(unknown_config_key(json::object()), "");
  for (const std::string& name : preset_names()) {
    json all = preset_json(name);
    EXPECT_EQ(unknown_config_key(all), "") << name;
    EXPECT_EQ(unknown_config_key(to_json(load_model_config(name))), "") << name;
  }
  EXPECT_EQ(unknown_config_key({{"hidden_size", 64}, {"hidden_sise", 64}}), "hidden_sise");
  EXPECT_EQ(unknown_config_key({{"linear_attn_config", {{"heads", 2}}}}), "linear_attn_config.heads");
  EXPECT_EQ(unknown_config_key({{"vision_config", {{"vt_hidden_size", 8}}}, {"dtype", "float32"}}), "");
}

TEST(Config, ErrorsNameKeyExpectedAndFound) {
  json base = to_json(test::tiny_config());
  json bad = base;
  bad["text_config"]["hidden_size"] = -3;
  EXPECT_THAT(error_of(bad), HasSubstr("'hidden_size' must be positive, got -3"));
  bad = base;
  bad["text_config"].erase("vocab_size");
  EXPECT_THAT(error_of(bad), HasSubstr("'vocab_size' is missing"));
  bad = base;
  bad["text_config"]["num_experts_per_token"] = 13;
  EXPECT_THAT(error_of(bad), HasSubstr("must be 1 to 12, got 13"));
  bad = base;
  bad["text_config"]["linear_attn_config"]["kda_layers"] = {0, 1};
  EXPECT_THAT(error_of(bad), HasSubstr("'kda_layers' holds 0"));
  bad = base;
  bad["text_config"]["linear_attn_config"]["gate_lower_bound"] = -9.0;
  EXPECT_THAT(error_of(bad), HasSubstr("at least -5"));
  bad = base;
  bad["godwit"]["router_inptu"] = "latent";
  EXPECT_THAT(error_of(bad), HasSubstr("unknown key 'router_inptu'"));
  bad = base;
  bad["godwit"]["mla_gate"] = "sometimes";
  EXPECT_THAT(error_of(bad), HasSubstr("got \"sometimes\""));
  for (const char* key : {"num_experts", "num_shared_experts", "first_k_dense_replace", "attn_res_block_size",
                          "q_lora_rank", "activation_situ_beta", "initializer_range"}) {
    bad = base;
    bad["text_config"][key] = -1;
    EXPECT_THAT(error_of(bad), HasSubstr(std::string("'") + key + "' must not be negative, got -1"));
  }
  bad = base;
  bad["text_config"]["vocab_size"] = 18446744073709551615u;  // -1 in 64 bits
  EXPECT_THAT(error_of(bad), HasSubstr("'vocab_size' must be at most 2147483647, got 18446744073709551615"));
  bad = base;
  bad["text_config"]["num_hidden_layers"] = 1000000000;
  EXPECT_THAT(error_of(bad), HasSubstr("'num_hidden_layers' must be at most 100000"));
  bad = base;
  bad["text_config"]["num_experts"] = 2000000000;
  EXPECT_THAT(error_of(bad), HasSubstr("'num_experts' must be at most 65536, got 2000000000"));
  bad = base;
  bad["text_config"]["num_key_value_heads"] = 1;
  EXPECT_THAT(error_of(bad), HasSubstr("'num_key_value_heads' must be num_attention_heads, "));
  bad = base;
  bad["text_config"]["num_nextn_predict_layers"] = 1;
  EXPECT_THAT(error_of(bad), HasSubstr("'num_nextn_predict_layers' must be 0, got 1"));
  bad = base;
  bad["dtype"] = "float8";
  EXPECT_THAT(error_of(bad), HasSubstr("got \"float8\""));
  bad = base;
  bad["model_type"] = "llama";
  EXPECT_THAT(error_of(bad), HasSubstr("got \"llama\""));
  EXPECT_THAT(error_of(json::array()), HasSubstr("expected an object"));
  EXPECT_THROW(load_model_config("no-such-preset"), Error);
}

// Packed experts are read as MXFP4: anything else that looks like them must not be.
TEST(Config, OtherQuantisationsAreRefused) {
  const json weights = {{"num_bits", 4}, {"type", "float"}, {"group_size", 32}};
  const json known = {{"quant_method", "compressed-tensors"},
                      {"format", "mxfp4-pack-quantized"},
                      {"config_groups", {{"group_0", {{"weights", weights}}}}}};
  json base = to_json(test::tiny_config());
  base["text_config"]["quantization_config"] = known;
  EXPECT_NO_THROW(parse_model_config(base, "x"));
  base["text_config"]["quantization_config"] = nullptr;
  EXPECT_NO_THROW(parse_model_config(base, "x"));
  const auto refuses = [&](const char* pointer, const json& value, const char* text) {
    json bad = base;
    bad["text_config"]["quantization_config"] = known;
    bad["text_config"]["quantization_config"][json::json_pointer(pointer)] = value;
    EXPECT_THAT(error_of(bad), HasSubstr(text));
  };
  refuses("/format", "pack-quantized", "'format' is \"pack-quantized\", and only \"mxfp4-pack-quantized\"");
  refuses("/quant_method", "gptq", "'quant_method' is \"gptq\"");
  refuses("/config_groups/group_0/weights/group_size", 16, "'group_size' is 16, and only 32");
  refuses("/config_groups/group_0/weights/type", "int", "'type' is \"int\"");
  refuses("/config_groups/group_0/weights/num_bits", 8, "'num_bits' is 8");
  refuses("/config_groups/group_0/weights/symmetric", false, "'symmetric' is false");
  refuses("/config_groups/group_0/weights/strategy", "channel", "'strategy' is \"channel\"");
  refuses("/config_groups/group_0/weights/scale_dtype", "torch.float8_e4m3fn", "'scale_dtype' is");
  refuses("/config_groups/group_0/format", "nvfp4-pack-quantized", "'format' is \"nvfp4-pack-quantized\"");
}

// A key that is known to mean other mathematics is not passed over.
TEST(Config, OtherMathematicsIsRefused) {
  json base = to_json(test::tiny_config());
  const auto error_with = [&](const char* pointer, const json& value) {
    json changed = base;
    changed[json::json_pointer(pointer)] = value;
    return error_of(changed);
  };
  const auto refuses = [&](const char* pointer, const json& value, const char* text) {
    EXPECT_THAT(error_with(pointer, value), HasSubstr(text)) << pointer;
  };
  refuses("/text_config/model_type", "llama",
          "config.json: text_config: 'model_type' is \"llama\", and only \"kimi_linear\" is known");
  refuses("/text_config/topk_method", "greedy", "'topk_method' is \"greedy\"");
  refuses("/text_config/scoring_func", "softmax", "'scoring_func' is \"softmax\"");
  refuses("/text_config/attention_bias", true, "'attention_bias' is true, and only false is known");
  refuses("/text_config/attention_dropout", 0.1, "'attention_dropout' is 0.1");
  refuses("/text_config/sliding_window", 4096, "'sliding_window' is 4096");
  refuses("/text_config/rope_scaling", {{"type", "yarn"}, {"factor", 4.0}},
          "rope_scaling: 'type' is \"yarn\", and only \"default\" is known");
  refuses("/text_config/rope_scaling", {{"factor", 4.0}}, "positions are not scaled here");
  refuses("/text_config/rope_parameters", {{"rope_type", "llama3"}}, "'rope_type' is \"llama3\"");
  refuses("/text_config/rope_parameters", {{"factor", 4}}, "'factor' is 4, and only 1 is known");
  refuses("/text_config/rope_parameters", {{"full_attention", {{"rope_type", "yarn"}}}}, "differs by layers");
  refuses("/text_config/partial_rotary_factor", 0.5, "'partial_rotary_factor' is 0.5");
  refuses("/text_config/rope_interleave", false, "'rope_interleave' is false");
  refuses("/text_config/swiglu_limit", 7.0, "'swiglu_limit' is 7.0");
  refuses("/text_config/n_group", 4, "'n_group' is 4, and num_expert_group makes it");
  refuses("/text_config/n_routed_experts", 99, "'n_routed_experts' is 99");
  refuses("/topk_method", "greedy", "config.json: 'topk_method' is \"greedy\"");
  refuses("/rope_scaling", {{"type", "yarn"}}, "'type' is \"yarn\"");
  refuses("/text_config/routed_scaling_factor", 1e39, "more than a float holds");
  refuses("/text_config/rope_scaling", 8, "'rope_scaling' must be an object");
  refuses("/text_config/linear_attn_config/allow_neg_eigval", true, "'allow_neg_eigval' is true");
  refuses("/text_config/qk_head_dim", 13,
          "'qk_head_dim' is 13, and qk_nope_head_dim + qk_rope_head_dim makes it 12");
  refuses("/text_config/num_experts_per_tok", 4,
          "'num_experts_per_tok' is 4, and num_experts_per_token makes it 3");
  refuses("/text_config/norm_topk_prob", false, "'norm_topk_prob' is false");
  refuses("/text_config/linear_num_heads", 3, "'linear_num_heads' is 3");
  refuses("/text_config/layer_types/0", "full_attention", "'layer_types' is [\"full_attention\"]");
  refuses("/text_config/mlp_layer_types", json::array({"sparse", "dense"}), "'mlp_layer_types' is");
  refuses("/text_config/quantization_config", "mxfp4", "quantization_config: expected an object, got string");
  refuses("/text_config/quantization_config",
          {{"quant_method", "compressed-tensors"}, {"format", "mxfp4-pack-quantized"}, {"config_groups", 3}},
          "'config_groups' must be an object");
  for (const auto& [pointer, value] :
       {std::pair<const char*, json>{"/text_config/rope_scaling", nullptr},
        {"/text_config/rope_parameters", {{"rope_type", "default"}, {"rope_theta", 10000.0}}},
        {"/text_config/attention_dropout", 0.0},
        {"/text_config/qk_head_dim", 12},
        {"/text_config/a_key_of_the_future", {1, 2, 3}}})
    EXPECT_EQ(error_with(pointer, value), "") << pointer;
  base = preset_json("kimi-k3");
  refuses("/vision_config/norm_type", "layernorm", "vision_config: 'norm_type' is \"layernorm\"");
  refuses("/vision_config/mm_projector_type", "mlp", "'mm_projector_type' is \"mlp\"");
  refuses("/vision_config/text_hidden_size", 4096, "'text_hidden_size' is 4096, and hidden_size is 7168");
}

// An id that is not there is null, as in transformers; never -1.
TEST(Config, AbsentIdsAreNull) {
  for (const char* type : {"kimi_k3", "kimi_linear"}) {
    ModelConfig c = test::tiny_config();
    c.model_type = type;
    c.eos_id = 7;
    const json written = to_json(c);
    EXPECT_TRUE(written["bos_token_id"].is_null()) << written;
    EXPECT_TRUE(written["pad_token_id"].is_null()) << written;
    EXPECT_EQ(written["eos_token_id"], 7);
    const ModelConfig read = parse_model_config(written, "x");
    EXPECT_EQ(read.bos_id, -1);
    EXPECT_EQ(read.eos_id, 7);
  }
}

TEST(Config, EveryErrorNamesTheFile) {
  const testing::ScratchDir dir;
  const std::string path = dir / "config.json";
  for (const char* text :
       {"", "[]", "{}", "{\"model_type\": \"llama\"}", "{\"model_type\": 3}", "{\"vocab_size\": \"many\"}",
        "{\"text_config\": 3}", "{\"quantization_config\": []}", "{\"dtype\": 1, \"vocab_size\": 3}",
        "{\"vocab_size\": 9, \"hidden_size\": 1e99}", "\"\"", "{\"text_config\": {\"layer_types\": 3}}",
        "{\"rope_scaling\": []}"}) {
    testing::put_file(path, text);
    testing::expect_error([&] { load_model_config(dir.path()); }, {path + ":"});
    testing::expect_error([&] { load_model_config(path); }, {path + ":"});
  }
}

TEST(Config, MustBeAPlainFile) {
  const testing::ScratchDir dir;
  std::filesystem::create_directories(dir / "a/config.json");
  testing::expect_error([&] { load_model_config((dir / "a").string()); },
                        {"config.json", "not a regular file"});
  std::filesystem::create_directories(dir / "b");
  ASSERT_EQ(::mkfifo((dir / "b/config.json").c_str(), 0600), 0);
  testing::expect_error([&] { load_model_config((dir / "b").string()); },
                        {"config.json", "not a regular file"});
}

TEST(Weights, NamesShapesAndRolesOfK3) {
  const ModelConfig c = load_model_config("kimi-k3");
  ModelWeights w = weight_structure(c);
  std::map<std::string, ParamInfo> all;
  for_each_param(c, w, [&](const ParamInfo& info, at::Tensor&) {
    EXPECT_TRUE(all.emplace(info.name, info).second) << info.name;
  });
  const std::string at = "language_model.model.layers.";
  EXPECT_EQ(all.at(at + "0.mlp.gate_proj.weight").shape, (std::vector<int64_t>{33792, 7168}));
  EXPECT_EQ(all.at(at + "1.self_attn.A_log").shape, (std::vector<int64_t>{96}));
  EXPECT_TRUE(all.at(at + "1.self_attn.q_conv1d.weight").keep_fp32);
  EXPECT_EQ(all.at(at + "3.self_attn.q_b_proj.weight").head_rows, 192);
  EXPECT_EQ(all.at(at + "92.self_attn.kv_b_proj.weight").shape, (std::vector<int64_t>{24576, 512}));
  EXPECT_EQ(all.at(at + "92.block_sparse_moe.experts.w2.weight").shape,
            (std::vector<int64_t>{896, 3584, 3072}));
  EXPECT_EQ(all.at("language_model.model.output_attn_res_proj.weight").role, ParamRole::kQuery);
  EXPECT_EQ(all.at("language_model.lm_head.weight").role, ParamRole::kHead);
  EXPECT_FALSE(all.contains(at + "0.block_sparse_moe.gate.weight"));
}

TEST(Weights, InitDependsOnlyOnSeedAndName) {
  ModelConfig small = test::tiny_config(), large = test::tiny_config();
  large.layers = 6;
  large.kda_layer.push_back(true);
  ModelWeights a = init_weights(small, 7, at::kCPU, at::kFloat),
               b = init_weights(large, 7, at::kCPU, at::kFloat);
  EXPECT_TRUE(a.layers[3].kda->q_proj.equal(b.layers[3].kda->q_proj));
  EXPECT_FALSE(a.layers[3].kda->q_proj.equal(a.layers[1].kda->q_proj));
  EXPECT_FALSE(a.embed.equal(init_weights(small, 8, at::kCPU, at::kFloat).embed));
  EXPECT_EQ(a.layers[2].attn_res_query.abs().max().item<float>(), 0.0f);
}

}  // namespace
}  // namespace godwit
