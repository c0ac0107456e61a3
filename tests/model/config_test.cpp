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
