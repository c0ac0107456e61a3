// Conversion: every key comes through, MXFP4 bit for bit, and the model stays the same model.
#include "godwit/model/convert.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "godwit/io/checkpoint_dir.h"
#include "godwit/io/checkpoint_tensor.h"
#include "godwit/model/checkpoint.h"
#include "godwit/model/forward.h"
#include "tests/model/tiny.h"
#include "tests/support/compare.h"
#include "tests/support/files.h"

namespace godwit {
namespace {

using at::Tensor;
using nlohmann::json;
using testing::expect_error;
using testing::ScratchDir;

const std::string kK3 = GODWIT_FIXTURES "/k3";  // python/make_k3_checkpoint.py
const std::string kKimiLinear = GODWIT_FIXTURES "/kimi_linear";

struct Raw {
  io::TensorSpec spec;
  std::string bytes;
  bool operator==(const Raw&) const = default;
};

// Everything that a directory holds.
std::map<std::string, Raw> raw(const std::string& directory) {
  std::map<std::string, Raw> out;
  const io::CheckpointDir checkpoint(directory);
  for (const std::string_view name : checkpoint.names()) {
    const auto found = checkpoint.at(name);
    out[std::string(name)] = {*found.tensor, std::string(io::as_text(found.bytes))};
  }
  return out;
}

Tensor logits(const std::string& directory, at::ScalarType dtype = at::kFloat) {
  const at::NoGradGuard no_grad;
  const ModelConfig config = load_model_config(directory);
  const ModelWeights weights = load_weights(config, directory, at::kCPU, dtype);
  const Tensor ids = at::arange(0, 40, at::kLong).mul(7).remainder(config.vocab_size);
  return forward_logits(config, weights, {.ids = ids, .cu_seqlens = make_cu_seqlens({23, 17})});
}

ConvertOptions to(ConvertDtype dtype) {
  return {.dtype = dtype};
}

json config_of(const std::string& directory) {
  return json::parse(read_file(directory + "/config.json"));
}

TEST(ConvertK3, AsStoredEveryByteComesBack) {
  const ScratchDir dir;
  const ConvertSummary summary = convert_checkpoint(kK3, dir / "out", {.shard_bytes = 1});
  EXPECT_EQ(summary.tensors_in, 190);
  EXPECT_EQ(summary.tensors_out, 190);
  EXPECT_EQ(summary.files, 7);
  EXPECT_EQ(summary.vision, 12);
  EXPECT_EQ(summary.bytes, io::CheckpointDir(kK3).declared_size());
  EXPECT_TRUE(summary.packed);
  EXPECT_EQ(raw(dir / "out"), raw(kK3));
  const io::CheckpointDir out(dir / "out"), in(kK3);
  out.verify();
  EXPECT_EQ(out.shard_files(), in.shard_files());
  for (const std::string_view name : in.names()) EXPECT_EQ(out.shard_of(name), in.shard_of(name)) << name;
  EXPECT_EQ(config_of(dir / "out"), config_of(kK3));
  EXPECT_TRUE(std::filesystem::exists(dir / "out/generation_config.json"));
}

TEST(ConvertK3, OneFileOrManyMakesNoDifference) {
  const ScratchDir dir;
  EXPECT_EQ(convert_checkpoint(kK3, dir / "one", {}).files, 1);
  EXPECT_EQ(convert_checkpoint(dir / "one", dir / "many", {.shard_bytes = 1}).files, 7);
  EXPECT_EQ(raw(dir / "one"), raw(kK3));
  EXPECT_EQ(raw(dir / "many"), raw(kK3));
}

// Packed -> bf16 or f32 -> packed: with the scales of the original every byte, without them every value.
TEST(ConvertK3, Mxfp4RoundTrip) {
  for (const ConvertDtype plain : {ConvertDtype::kBf16, ConvertDtype::kF32}) {
    const ScratchDir dir;
    convert_checkpoint(kK3, dir / "plain", to(plain));
    const auto there = raw(dir / "plain");
    for (const auto& [name, tensor] : there) EXPECT_EQ(name.find("weight_"), std::string::npos) << name;
    EXPECT_FALSE(config_of(dir / "plain")["text_config"].contains("quantization_config"));

    convert_checkpoint(dir / "plain", dir / "scales", {.dtype = ConvertDtype::kMxfp4, .scales_from = kK3});
    EXPECT_EQ(raw(dir / "scales"), raw(kK3));
    EXPECT_EQ(config_of(dir / "scales"), config_of(kK3));

    convert_checkpoint(dir / "plain", dir / "packed", to(ConvertDtype::kMxfp4));
    convert_checkpoint(dir / "packed", dir / "again", to(plain));
    EXPECT_EQ(raw(dir / "again"), there);  // values: exact under any power-of-two scale
    convert_checkpoint(dir / "again", dir / "packed2", to(ConvertDtype::kMxfp4));
    EXPECT_EQ(raw(dir / "packed2"), raw(dir / "packed"));  // our own packing: every byte
  }
}

// python/reference in fp64 on the same files: MXFP4, padded A_log and nested names read by someone else.
TEST(ConvertK3, AnIndependentReaderGetsTheSameLogits) {
  const Tensor expected = io::load_tensors(GODWIT_FIXTURES "/k3_logits.safetensors").at(0).second;
  EXPECT_TRUE(test::close(logits(kK3), expected, test::kFp32Chain));
}

TEST(ConvertK3, TheModelStaysTheSame) {
  const Tensor expected = logits(kK3);
  ASSERT_TRUE(at::isfinite(expected).all().item<bool>());
  EXPECT_GT(expected.std().item<double>(), 0.1);
  const ScratchDir dir;
  const auto same = [&](const std::string& name, const std::string& from, ConvertOptions options) {
    convert_checkpoint(from, dir / name, options);
    EXPECT_TRUE(test::bit_equal(logits(dir / name), expected)) << name;
  };
  same("bf16", kK3, to(ConvertDtype::kBf16));  // exact: MXFP4 values fit bf16
  same("f32", kK3, to(ConvertDtype::kF32));
  same("mxfp4", dir / "f32", to(ConvertDtype::kMxfp4));
  same("stored", dir / "mxfp4", {.shard_bytes = 1});

  // Loaded and saved, then converted.
  const ModelConfig config = load_model_config(kK3);
  ModelWeights weights = load_weights(config, kK3, at::kCPU, at::kFloat);
  std::filesystem::create_directory(dir / "saved");
  save_weights(config, weights, dir / "saved");
  EXPECT_TRUE(test::bit_equal(logits(dir / "saved"), expected));
  same("saved_mxfp4", dir / "saved", to(ConvertDtype::kMxfp4));
  EXPECT_TRUE(test::bit_equal(logits(kK3, at::kBFloat16), logits(dir / "bf16", at::kBFloat16)));
}

TEST(ConvertK3, WithoutVisionAsKimiLinearAndBack) {
  const ScratchDir dir;
  const ConvertSummary summary = convert_checkpoint(kK3, dir / "flat", {.model_type = "kimi_linear"});
  EXPECT_EQ(summary.left_out, 12);
  const auto flat = raw(dir / "flat");
  EXPECT_EQ(flat.size(), 190u - 12u);
  EXPECT_EQ(flat.at("model.layers.0.self_attn.A_log").spec.shape, (std::vector<int64_t>{1, 1, 2, 1}));
  EXPECT_TRUE(flat.contains("model.layers.1.block_sparse_moe.experts.3.w2.weight_scale"));
  EXPECT_TRUE(test::bit_equal(logits(dir / "flat"), logits(kK3)));
  EXPECT_EQ(summary.keys_left_out, (std::vector<std::string>{"auto_map", "ignore_index", "image_placeholder",
                                                             "media_placeholder_token_id", "vision_config"}));
  convert_checkpoint(dir / "flat", dir / "nested", {.model_type = "kimi_k3"});
  auto expected = raw(kK3);
  std::erase_if(expected, [](const auto& entry) { return !entry.first.starts_with("language_model."); });
  EXPECT_EQ(raw(dir / "nested"), expected);
}

// What nothing here reads stays, in the other layout's place; null stays null.
TEST(Convert, CrossingLayoutsKeepsTheConfiguration) {
  const ScratchDir dir;
  std::filesystem::copy(kK3, dir / "k3");
  json k3 = config_of(kK3);
  k3["bos_token_id"] = nullptr;
  k3["our_note"] = "outside";
  k3["text_config"]["our_other_note"] = {1, 2};
  k3["text_config"]["use_cache"] = true;
  testing::put_file(dir / "k3/config.json", k3.dump());
  convert_checkpoint(dir / "k3", dir / "flat", {.model_type = "kimi_linear"});
  const json flat = config_of(dir / "flat");
  json expected = k3["text_config"];
  expected["model_type"] = "kimi_linear";
  expected["architectures"] = {"KimiLinearForCausalLM"};
  for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id", "dtype", "our_note"})
    expected[key] = k3[key];
  EXPECT_EQ(flat, expected);

  convert_checkpoint(dir / "flat", dir / "nested", {.model_type = "kimi_k3"});
  json again = config_of(dir / "nested");
  EXPECT_TRUE(again["bos_token_id"].is_null());
  EXPECT_EQ(again["eos_token_id"], k3["eos_token_id"]);
  EXPECT_EQ(again["text_config"], expected);
  EXPECT_EQ(again["architectures"], k3["architectures"]);

  // As transformers writes it, with ids that are null and keys of its own.
  const ConvertSummary summary = convert_checkpoint(kKimiLinear, dir / "hf", {.model_type = "kimi_k3"});
  const json hf = config_of(kKimiLinear), ours = config_of(dir / "hf");
  EXPECT_EQ(ours["text_config"], hf);
  EXPECT_TRUE(ours["eos_token_id"].is_null());
  EXPECT_FALSE(ours.contains("media_placeholder_token_id"));
  EXPECT_TRUE(summary.keys_left_out.empty());
  EXPECT_TRUE(test::bit_equal(logits(dir / "hf"), logits(kKimiLinear)));
}

// transformers names the dense layer's MLP like a sparse one; we write the released name.
TEST(ConvertKimiLinear, KeepsTheModel) {
  const ScratchDir dir;
  convert_checkpoint(kKimiLinear, dir / "a", {});
  EXPECT_TRUE(test::bit_equal(logits(dir / "a"), logits(kKimiLinear)));
  EXPECT_TRUE(raw(dir / "a").contains("model.layers.0.mlp.up_proj.weight"));
  convert_checkpoint(kKimiLinear, dir / "b", to(ConvertDtype::kBf16));
  const auto tensors = raw(dir / "b");
  EXPECT_EQ(tensors.at("model.layers.0.self_attn.dt_bias").spec.dtype, io::Dtype::F32);
  EXPECT_EQ(tensors.at("model.layers.0.self_attn.q_conv1d.weight").spec.dtype, io::Dtype::F32);
  EXPECT_EQ(tensors.at("model.layers.0.self_attn.q_proj.weight").spec.dtype, io::Dtype::BF16);
  EXPECT_EQ(config_of(dir / "b")["dtype"], "bfloat16");
}

TEST(Convert, Refusals) {
  const ScratchDir dir;
  expect_error([&] { convert_checkpoint(dir / "absent", dir / "out", {}); }, {"absent", "not a directory"});
  expect_error([&] { convert_checkpoint(kK3, kKimiLinear, {}); }, {kKimiLinear, "exists already"});
  expect_error([&] { convert_checkpoint(kKimiLinear, dir / "out", to(ConvertDtype::kMxfp4)); },
               {"experts.w1.weight", "MXFP4 needs an input width that is a multiple of 32, got 24"});
  expect_error(
      [&] {
        convert_checkpoint(kK3, dir / "plain", to(ConvertDtype::kBf16));
        convert_checkpoint(dir / "plain", dir / "out",
                           {.dtype = ConvertDtype::kMxfp4, .scales_from = dir / "plain"});
      },
      {dir / "plain", "no MXFP4 scales for language_model.model.layers.1."});
  // A weight that is not finite has no MXFP4 form; nothing half-written stays.
  const ModelConfig config = load_model_config(kK3);
  ModelWeights weights = load_weights(config, kK3, at::kCPU, at::kFloat);
  weights.layers[2].moe->w3[1][0][0] = std::numeric_limits<float>::quiet_NaN();
  std::filesystem::create_directory(dir / "nan");
  save_weights(config, weights, dir / "nan");
  expect_error([&] { convert_checkpoint(dir / "nan", dir / "out", to(ConvertDtype::kMxfp4)); },
               {dir / "nan", "layers.2.block_sparse_moe.experts.1.w3.weight", "not finite"});
  EXPECT_FALSE(std::filesystem::exists(dir / "out"));
  EXPECT_EQ(dir.entries(), 2);  // "plain" and "nan"
  // Nor has it a meaning elsewhere; an fp32 value may be too large for bf16 and for MXFP4.
  expect_error([&] { convert_checkpoint(dir / "nan", dir / "out", {}); },
               {"experts.1.w3.weight: 1 of 2048 values are not finite as BF16: [0, 0]"});
  weights.layers[2].moe->w3[1][0][0] = 0;
  weights.layers[0].kda->q_proj[2][1] = -3.4e38;
  weights.layers[1].moe->w1[0][1][2] = 3.4e38;
  ModelConfig wide = config;
  wide.dtype = "float32";
  std::filesystem::create_directory(dir / "wide");
  save_weights(wide, weights, dir / "wide");
  convert_checkpoint(dir / "wide", dir / "same", {});
  expect_error(
      [&] { convert_checkpoint(dir / "wide", dir / "out", to(ConvertDtype::kBf16)); },
      {"wide: ", "layers.0.self_attn.q_proj.weight: 1 of 1024 values are not finite as BF16: [2, 1]"});
  weights.layers[0].kda->q_proj[2][1] = 0;
  std::filesystem::create_directory(dir / "wide2");
  save_weights(wide, weights, dir / "wide2");
  expect_error(
      [&] { convert_checkpoint(dir / "wide2", dir / "out", to(ConvertDtype::kMxfp4)); },
      {"layers.1.block_sparse_moe.experts.0.w1.weight: 1 of 2048 values are not finite as MXFP4: [1, 2]"});
  EXPECT_FALSE(std::filesystem::exists(dir / "out"));
}

// A scale that is NaN is copied nowhere, whatever is asked for.
TEST(Convert, RefusesScalesThatAreNotFinite) {
  const ScratchDir dir;
  convert_checkpoint(kK3, dir / "k3", {});
  std::map<std::string, Tensor> tensors;
  for (auto& [name, value] : io::load_tensors(dir / "k3/model.safetensors")) tensors[name] = value.clone();
  tensors.at("language_model.model.layers.1.block_sparse_moe.experts.2.w3.weight_scale")[3][1] = 255;
  io::save_tensors(dir / "k3/model.safetensors", {tensors.begin(), tensors.end()});
  for (const ConvertDtype dtype : {ConvertDtype::kAsStored, ConvertDtype::kBf16, ConvertDtype::kMxfp4}) {
    expect_error([&] { convert_checkpoint(dir / "k3", dir / "out", to(dtype)); },
                 {"layers.1.block_sparse_moe.experts.2.w3.weight_packed: 32 of 2048 values are not finite",
                  "[3, 32], [3, 33], "});
  }
}

TEST(Convert, ScalesThatNothingTakesAreRefused) {
  const ScratchDir dir;
  convert_checkpoint(kK3, dir / "plain", to(ConvertDtype::kBf16));
  for (const ConvertDtype dtype : {ConvertDtype::kAsStored, ConvertDtype::kBf16}) {
    expect_error(
        [&] { convert_checkpoint(dir / "plain", dir / "out", {.dtype = dtype, .scales_from = kK3}); },
        {"--scales-from: nothing is packed without --dtype mxfp4"});
  }
  expect_error(
      [&] { convert_checkpoint(kK3, dir / "out", {.dtype = ConvertDtype::kMxfp4, .scales_from = kK3}); },
      {"--scales-from", "are MXFP4 and keep their scales"});
  EXPECT_EQ(dir.entries(), 1);
}

TEST(Convert, NotIntoItsOwnInput) {
  const ScratchDir dir;
  std::filesystem::copy(kK3, dir / "k3");
  std::filesystem::create_directory_symlink("k3", dir / "link");
  for (const char* out : {"k3/out", "k3", "link/deep/out", "k3/../k3/out"})
    expect_error([&] { convert_checkpoint(dir / "k3", dir / out, {}); }, {out, "lies in", "somewhere else"});
  EXPECT_FALSE(std::filesystem::exists(dir / "k3/out"));
  convert_checkpoint(dir / "k3", dir / "k3-out", {});  // a name that only begins alike
}

// A non-zero tail of A_log would be a ninth head: refused wherever it is read.
TEST(Convert, RefusesAnALogWithATail) {
  const ScratchDir dir;
  convert_checkpoint(kK3, dir / "k3", {});
  std::map<std::string, Tensor> tensors;
  for (auto& [name, value] : io::load_tensors(dir / "k3/model.safetensors")) tensors[name] = value.clone();
  tensors.at("language_model.model.layers.1.self_attn.A_log")[5] = 1e-30;
  io::save_tensors(dir / "k3/model.safetensors", {tensors.begin(), tensors.end()});
  expect_error([&] { convert_checkpoint(dir / "k3", dir / "out", {}); },
               {"layers.1.self_attn.A_log", "2 of 128"});
}

}  // namespace
}  // namespace godwit
