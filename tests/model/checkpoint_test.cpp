// Weights to a directory and back, and the released layout's names, shapes and faults.
#include "godwit/model/checkpoint.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "godwit/io/checkpoint_dir.h"
#include "godwit/io/checkpoint_tensor.h"
#include "godwit/io/mxfp4.h"
#include "tests/model/tiny.h"
#include "tests/support/compare.h"
#include "tests/support/files.h"

namespace godwit {
namespace {

using at::Tensor;
using Stored = std::map<std::string, Tensor>;

// Every parameter random, so that no two tensors could be exchanged unseen.
ModelWeights random_weights(const ModelConfig& config, at::ScalarType dtype) {
  ModelWeights weights = init_weights(config, 3, at::kCPU, dtype);
  at::manual_seed(5);
  for_each_param(config, weights, [](const ParamInfo&, Tensor& value) { value = at::randn_like(value); });
  return weights;
}

std::vector<std::pair<std::string, Tensor>> flat(const ModelConfig& config, ModelWeights& weights) {
  std::vector<std::pair<std::string, Tensor>> out;
  for_each_param(config, weights,
                 [&](const ParamInfo& info, Tensor& value) { out.emplace_back(info.name, value); });
  return out;
}

void expect_same(const ModelConfig& config, ModelWeights& actual, ModelWeights& expected) {
  const auto a = flat(config, actual), e = flat(config, expected);
  ASSERT_EQ(a.size(), e.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(test::bit_equal(a[i].second, e[i].second)) << a[i].first;
}

Stored read_all(const testing::ScratchDir& dir) {
  Stored out;
  for (auto& [name, value] : io::load_tensors(dir / "model.safetensors")) out[name] = value.clone();
  return out;
}

// What config.json has to say of a directory with packed experts.
void say_packed(const testing::ScratchDir& dir) {
  const nlohmann::json weights = {{"num_bits", 4}, {"type", "float"}, {"group_size", 32}};
  nlohmann::json root = nlohmann::json::parse(read_file(dir / "config.json"));
  root["text_config"]["quantization_config"] = {{"quant_method", "compressed-tensors"},
                                                {"format", "mxfp4-pack-quantized"},
                                                {"config_groups", {{"group_0", {{"weights", weights}}}}}};
  testing::put_file(dir / "config.json", root.dump());
}

void write_all(const testing::ScratchDir& dir, const Stored& tensors) {
  io::save_tensors(dir / "model.safetensors", {tensors.begin(), tensors.end()});
}

// Saves the tiny K3 model, changes what the file holds, and loads it.
void expect_refused(const std::function<void(Stored&)>& change, std::initializer_list<std::string> parts,
                    const ModelConfig& config = test::tiny_config()) {
  const testing::ScratchDir dir;
  ModelWeights weights = random_weights(config, at::kFloat);
  save_weights(config, weights, dir.path());
  Stored tensors = read_all(dir);
  change(tensors);
  write_all(dir, tensors);
  testing::expect_error([&] { load_weights(config, dir.path(), at::kCPU, at::kFloat); }, parts);
}

const std::string kLayer1 = "language_model.model.layers.1.";

class CheckpointVariants : public ::testing::TestWithParam<test::NamedConfig> {};

TEST_P(CheckpointVariants, SaveThenLoadIsBitEqual) {
  for (const char* dtype : {"float32", "bfloat16"}) {
    ModelConfig config = GetParam().config;
    config.dtype = dtype;
    const testing::ScratchDir dir;
    ModelWeights weights = random_weights(config, scalar_type_of(dtype));
    save_weights(config, weights, dir.path());
    const ModelConfig read = load_model_config(dir.path());
    EXPECT_EQ(to_json(read), to_json(config));
    ModelWeights loaded = load_weights(read, dir.path(), at::kCPU, scalar_type_of(dtype));
    expect_same(config, loaded, weights);
  }
}

INSTANTIATE_TEST_SUITE_P(Tiny, CheckpointVariants, ::testing::ValuesIn(test::tiny_variants()),
                         [](const auto& param_info) { return param_info.param.name; });

TEST(Checkpoint, HasTheReleasedNamesAndShapes) {
  const testing::ScratchDir dir;
  ModelConfig config = test::tiny_config();
  config.dtype = "bfloat16";
  ModelWeights weights = random_weights(config, at::kBFloat16);
  save_weights(config, weights, dir.path());
  const Stored tensors = read_all(dir);
  const auto expect = [&](const std::string& name, at::IntArrayRef shape, at::ScalarType type) {
    ASSERT_TRUE(tensors.contains(name)) << name;
    EXPECT_EQ(tensors.at(name).sizes(), shape) << name;
    EXPECT_EQ(tensors.at(name).scalar_type(), type) << name;
  };
  expect("language_model.model.embed_tokens.weight", {61, 32}, at::kBFloat16);
  expect("language_model.lm_head.weight", {61, 32}, at::kBFloat16);
  expect("language_model.model.output_attn_res_proj.weight", {1, 32}, at::kBFloat16);
  expect("language_model.model.output_attn_res_norm.weight", {32}, at::kBFloat16);
  expect(kLayer1 + "input_layernorm.weight", {32}, at::kBFloat16);
  expect(kLayer1 + "post_attention_layernorm.weight", {32}, at::kBFloat16);
  expect(kLayer1 + "self_attention_res_norm.weight", {32}, at::kBFloat16);
  expect(kLayer1 + "self_attention_res_proj.weight", {1, 32}, at::kBFloat16);
  expect(kLayer1 + "mlp_res_proj.weight", {1, 32}, at::kBFloat16);
  expect(kLayer1 + "self_attn.q_proj.weight", {32, 32}, at::kBFloat16);
  expect(kLayer1 + "self_attn.q_conv1d.weight", {32, 1, 4}, at::kFloat);
  expect(kLayer1 + "self_attn.A_log", {128}, at::kFloat);
  expect(kLayer1 + "self_attn.dt_bias", {32}, at::kFloat);
  expect(kLayer1 + "self_attn.o_norm.weight", {16}, at::kFloat);
  expect(kLayer1 + "self_attn.f_a_proj.weight", {16, 32}, at::kBFloat16);
  expect("language_model.model.layers.2.self_attn.q_a_layernorm.weight", {24}, at::kBFloat16);
  expect("language_model.model.layers.2.self_attn.kv_a_proj_with_mqa.weight", {20, 32}, at::kBFloat16);
  expect("language_model.model.layers.0.mlp.down_proj.weight", {32, 48}, at::kBFloat16);
  expect(kLayer1 + "block_sparse_moe.gate.weight", {12, 32}, at::kBFloat16);
  expect(kLayer1 + "block_sparse_moe.gate.e_score_correction_bias", {12}, at::kFloat);
  expect(kLayer1 + "block_sparse_moe.routed_expert_down_proj.weight", {16, 32}, at::kBFloat16);
  expect(kLayer1 + "block_sparse_moe.routed_expert_norm.weight", {16}, at::kBFloat16);
  expect(kLayer1 + "block_sparse_moe.shared_experts.gate_proj.weight", {16, 32}, at::kBFloat16);
  expect(kLayer1 + "block_sparse_moe.experts.11.w1.weight", {8, 16}, at::kBFloat16);
  expect(kLayer1 + "block_sparse_moe.experts.11.w2.weight", {16, 8}, at::kBFloat16);
  const Tensor a_log = tensors.at(kLayer1 + "self_attn.A_log");
  EXPECT_TRUE(test::bit_equal(a_log.slice(0, 0, 2), weights.layers[1].kda->A_log));
  EXPECT_TRUE(a_log.slice(0, 2).eq(0).all().item<bool>());
}

TEST(Checkpoint, ReadsEveryShapeOfALog) {
  for (const test::NamedConfig& variant : test::tiny_variants()) {
    if (variant.name != "k3" && variant.name != "kimi_linear") continue;
    const ModelConfig& config = variant.config;
    const testing::ScratchDir dir;
    ModelWeights weights = random_weights(config, at::kFloat);
    save_weights(config, weights, dir.path());
    Stored tensors = read_all(dir);
    const std::string name = config.prefix() + "model.layers.1.self_attn.A_log";
    const Tensor values = weights.layers[1].kda->A_log;
    if (variant.name == "kimi_linear") {
      EXPECT_EQ(tensors.at(name).sizes(), at::IntArrayRef({1, 1, 2, 1}));
    }
    for (const Tensor& stored : {values, values.reshape({1, 1, 2, 1})}) {
      tensors[name] = stored;
      write_all(dir, tensors);
      ModelWeights loaded = load_weights(config, dir.path(), at::kCPU, at::kFloat);
      expect_same(config, loaded, weights);
    }
  }
}

TEST(Checkpoint, ReadsTheDenseLayerUnderTheSparseLayersName) {
  const ModelConfig config = test::tiny_variants().back().config;
  ASSERT_EQ(config.model_type, "kimi_linear");
  const testing::ScratchDir dir;
  ModelWeights weights = random_weights(config, at::kFloat);
  save_weights(config, weights, dir.path());
  Stored tensors = read_all(dir);
  for (const char* matrix : {"gate_proj", "up_proj", "down_proj"}) {
    auto node = tensors.extract(fmt::format("model.layers.0.mlp.{}.weight", matrix));
    node.key() = fmt::format("model.layers.0.block_sparse_moe.{}.weight", matrix);
    tensors.insert(std::move(node));
  }
  write_all(dir, tensors);
  ModelWeights loaded = load_weights(config, dir.path(), at::kCPU, at::kFloat);
  expect_same(config, loaded, weights);
}

TEST(Checkpoint, RefusesAPaddedALogWithValuesBeyondTheHeads) {
  expect_refused([](Stored& t) { t[kLayer1 + "self_attn.A_log"][127] = 1.0; },
                 {kLayer1 + "self_attn.A_log", "2 of 128"});
}

TEST(Checkpoint, NamesMissingUnexpectedAndMisshapenTensors) {
  expect_refused(
      [](Stored& t) {
        t.erase(kLayer1 + "self_attn.q_proj.weight");
        t.erase(kLayer1 + "block_sparse_moe.experts.7.w3.weight");
        t["language_model.model.extra.weight"] = at::zeros({2});
        t["language_model.model.norm.weight"] = at::zeros({31});
        t["vision_tower.patch_embed.proj.weight"] = at::zeros({2});  // the configuration has no vision
      },
      {"missing", kLayer1 + "self_attn.q_proj.weight", kLayer1 + "block_sparse_moe.experts.7.w3.weight",
       "2 unexpected", "language_model.model.extra.weight", "vision_tower.patch_embed.proj.weight [2]",
       "language_model.model.norm.weight [31]", "[32]"});
}

TEST(Checkpoint, RefusesIntegersAsWeights) {
  expect_refused(
      [](Stored& t) {
        t[kLayer1 + "self_attn.q_proj.weight"] = at::zeros({32, 32}, at::kInt);
      },
      {kLayer1 + "self_attn.q_proj.weight I32", "a type that cannot be converted"});
}

// The experts of one layer as MXFP4, the others as they are.
TEST(Checkpoint, LoadsMxfp4Experts) {
  ModelConfig config = test::tiny_config();
  config.moe.latent = 32;
  config.moe.inner = 64;
  const testing::ScratchDir dir;
  ModelWeights weights = random_weights(config, at::kFloat);
  save_weights(config, weights, dir.path());
  Stored tensors = read_all(dir);
  const auto pack = [&](const char* matrix, const Tensor& of_all) {
    for (int64_t e = 0; e < config.moe.experts; ++e) {
      Tensor w = of_all.select(0, e);  // becomes what the packed form stands for
      const auto n = static_cast<size_t>(w.numel());
      Tensor packed = at::empty({w.size(0), w.size(1) / 2}, at::kByte);
      Tensor scale = at::empty({w.size(0), w.size(1) / 32}, at::kByte);
      io::mxfp4_quantize({w.data_ptr<float>(), n}, {packed.data_ptr<uint8_t>(), n / 2},
                         {scale.data_ptr<uint8_t>(), n / 32}, io::Mxfp4ScaleRule::kCompressedTensors);
      io::mxfp4_dequantize({packed.data_ptr<uint8_t>(), n / 2}, {scale.data_ptr<uint8_t>(), n / 32},
                           {w.data_ptr<float>(), n});
      const std::string name = fmt::format("{}block_sparse_moe.experts.{}.{}.weight", kLayer1, e, matrix);
      ASSERT_EQ(tensors.erase(name), 1u);
      tensors[name + "_packed"] = packed;
      tensors[name + "_scale"] = scale;
    }
  };
  MoeWeights& moe = *weights.layers[1].moe;
  pack("w1", moe.w1);
  pack("w3", moe.w3);
  pack("w2", moe.w2);
  write_all(dir, tensors);
  testing::expect_error(
      [&] { load_weights(config, dir.path(), at::kCPU, at::kFloat); },
      {"packed without a 'quantization_config'", kLayer1 + "block_sparse_moe.experts.0.w1."});
  say_packed(dir);
  ModelWeights loaded = load_weights(config, dir.path(), at::kCPU, at::kFloat);
  expect_same(config, loaded, weights);

  // A scale that is NaN, and one that overflows with the larger elements.
  const std::string w1 = kLayer1 + "block_sparse_moe.experts.4.w1.weight";
  for (const int scale : {255, 254}) {
    Stored bad = tensors;
    bad[w1 + "_packed"] = tensors[w1 + "_packed"].clone().fill_(0x72);  // 1 and 6
    bad[w1 + "_scale"] = tensors[w1 + "_scale"].clone();
    bad[w1 + "_scale"][3][0] = scale;
    write_all(dir, bad);
    for (const char* format : {"", "mxfp4", "int8"}) {
      testing::expect_error(
          [&] { load_weights(config, dir.path(), at::kCPU, at::kBFloat16, weight_format_of(format)); },
          {w1 + "_packed: ", scale == 255 ? "32 of 2048 values are not finite as MXFP4: [3, 0], [3, 1], "
                                          : "16 of 2048 values are not finite as MXFP4: [3, 1], [3, 3], "});
    }
  }

  tensors.erase(kLayer1 + "block_sparse_moe.experts.3.w2.weight_scale");
  write_all(dir, tensors);
  testing::expect_error([&] { load_weights(config, dir.path(), at::kCPU, at::kFloat); },
                        {kLayer1 + "block_sparse_moe.experts.3.w2.weight_scale"});
}

// Refused where it is read: it would only show in the logits.
TEST(Checkpoint, RefusesWhatIsNotFinite) {
  const std::string proj = kLayer1 + "self_attn.q_proj.weight";
  expect_refused([&](Stored& t) { t[proj][3][17] = std::numeric_limits<float>::quiet_NaN(); },
                 {"model.safetensors: " + proj + ": 1 of 1024 values are not finite as F32: [3, 17]"});
  expect_refused(
      [&](Stored& t) { t[kLayer1 + "self_attn.dt_bias"][2] = -std::numeric_limits<float>::infinity(); },
      {kLayer1 + "self_attn.dt_bias: 1 of 32 values are not finite as F32: [2]"});
  // fp32 values that no bf16 holds, but for the parameters that stay fp32.
  const ModelConfig config = test::tiny_config();
  const testing::ScratchDir dir;
  ModelWeights weights = random_weights(config, at::kFloat);
  save_weights(config, weights, dir.path());
  Stored tensors = read_all(dir);
  tensors[kLayer1 + "self_attn.dt_bias"][2] = 3.4e38;
  write_all(dir, tensors);
  load_weights(config, dir.path(), at::kCPU, at::kBFloat16);
  tensors[proj][3].fill_(3.4e38);
  write_all(dir, tensors);
  load_weights(config, dir.path(), at::kCPU, at::kFloat);
  testing::expect_error(
      [&] { load_weights(config, dir.path(), at::kCPU, at::kBFloat16); },
      {proj + ": 32 of 1024 values are not finite as BF16: [3, 0], [3, 1], ", "[3, 9], ..."});
}

TEST(Checkpoint, RefusesToWriteOverACheckpoint) {
  const testing::ScratchDir dir;
  const ModelConfig config = test::tiny_config();
  ModelWeights weights = random_weights(config, at::kFloat);
  save_weights(config, weights, dir.path());
  testing::expect_error([&] { save_weights(config, weights, dir.path()); }, {dir.path().string()});
}

TEST(Checkpoint, ConvertsOnLoad) {
  const testing::ScratchDir dir;
  const ModelConfig config = test::tiny_config();
  ModelWeights weights = random_weights(config, at::kFloat);
  save_weights(config, weights, dir.path());
  ModelWeights expected = convert_weights(config, weights, at::kCPU, at::kBFloat16);
  ModelWeights loaded = load_weights(config, dir.path(), at::kCPU, at::kBFloat16);
  expect_same(config, loaded, expected);
}

}  // namespace
}  // namespace godwit
