// Kimi K3's released table of tensors, and what is said of a directory that does not fit it.
#include "godwit/model/layout.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <fstream>
#include <map>
#include <set>

#include "godwit/io/safetensors.h"
#include "tests/model/tiny.h"
#include "tests/support/files.h"

namespace godwit {
namespace {

using testing::ScratchDir;

const std::string kFixture = GODWIT_FIXTURES "/k3";  // python/make_k3_checkpoint.py

std::map<std::string, io::TensorSpec> specs_of(const std::vector<StoredParam>& params) {
  std::map<std::string, io::TensorSpec> out;
  for (const StoredParam& param : params) {
    for (int64_t piece = 0; piece < param.pieces(); ++piece) {
      for (const StoredPart part : {StoredPart::kWeight, StoredPart::kPacked, StoredPart::kScale}) {
        if ((part != StoredPart::kWeight) == param.packed) {
          const io::TensorSpec spec = param.spec(piece, part);
          out[spec.name] = spec;
        }
      }
    }
  }
  return out;
}

// Numbers of the released index and headers.
TEST(Layout, KimiK3HasEveryReleasedTensor) {
  const ModelConfig config = load_model_config("kimi-k3");
  const std::vector<StoredParam> params = stored_params(config, io::Dtype::BF16, /*packed=*/true);
  const std::vector<io::ShardPlan> plan = plan_files(config, params, kShardBytes);
  ASSERT_EQ(plan.size(), 96u);
  int64_t count = 0;
  uint64_t total = 0;
  std::map<io::Dtype, int64_t> by_dtype;
  for (const io::ShardPlan& shard : plan) {
    count += static_cast<int64_t>(shard.tensors.size());
    for (const io::TensorSpec& spec : shard.tensors) {
      total += io::checked_tensor_bytes(spec, "k3");
      ++by_dtype[spec.dtype];
    }
  }
  EXPECT_EQ(count, 497'220);
  EXPECT_EQ(total, 1'560'860'324'864u);
  EXPECT_EQ(by_dtype[io::Dtype::U8], 92 * 896 * 6);
  EXPECT_EQ(by_dtype[io::Dtype::F32],
            69 * (3 + 3) + 92);  // convolutions, A_log, dt_bias, o_norm; router bias
  EXPECT_EQ(plan[0].file, "model-00001-of-000096.safetensors");
  const auto holds = [&](size_t file, const std::string& name, std::vector<int64_t> shape, io::Dtype dtype) {
    for (const io::TensorSpec& spec : plan[file - 1].tensors) {
      if (spec.name != name) continue;
      EXPECT_EQ(spec.shape, shape) << name;
      EXPECT_EQ(spec.dtype, dtype) << name;
      return;
    }
    ADD_FAILURE() << name << " is not in file " << file;
  };
  const std::string layer = "language_model.model.layers.";
  holds(1, layer + "0.mlp.gate_proj.weight", {33792, 7168}, io::Dtype::BF16);
  holds(1, layer + "0.self_attn.A_log", {128}, io::Dtype::F32);
  holds(2, layer + "1.self_attn.q_conv1d.weight", {12288, 1, 4}, io::Dtype::F32);
  holds(4, layer + "3.self_attn.kv_a_proj_with_mqa.weight", {576, 7168}, io::Dtype::BF16);
  holds(93, layer + "92.block_sparse_moe.experts.895.w1.weight_packed", {3072, 1792}, io::Dtype::U8);
  holds(93, layer + "92.block_sparse_moe.experts.895.w2.weight_scale", {3584, 96}, io::Dtype::U8);
  holds(93, layer + "92.block_sparse_moe.gate.e_score_correction_bias", {896}, io::Dtype::F32);
  holds(94, "language_model.lm_head.weight", {163840, 7168}, io::Dtype::BF16);
  holds(94, "language_model.model.output_attn_res_proj.weight", {1, 7168}, io::Dtype::BF16);
  holds(95, "mm_projector.proj.2.weight", {7168, 4096}, io::Dtype::BF16);
  holds(96, "vision_tower.patch_embed.pos_emb.weight", {64, 64, 1024}, io::Dtype::BF16);
  holds(96, "vision_tower.encoder.blocks.26.wqkv.weight", {4608, 1024}, io::Dtype::BF16);
}

int64_t anonymous_kib() {
  std::ifstream status("/proc/self/status");
  std::string word;
  int64_t kib = 0;
  while (status >> word) {
    if (word == "RssAnon:") status >> kib;
  }
  return kib;
}

// All 497,220 names in 96 files of the released sizes, headers and no data: 1.56 TB in name, 130 MB on disk.
// What is held is the index and one header.
TEST(Layout, KimiK3OpensShardByShard) {
  const ModelConfig config = load_model_config("kimi-k3");
  const ScratchDir dir;
  {
    const auto plan =
        plan_files(config, stored_params(config, io::Dtype::BF16, /*packed=*/true), kShardBytes);
    for (const io::ShardPlan& shard : plan) {
      std::string header = "{";
      uint64_t end = 0;
      for (const io::TensorSpec& spec : shard.tensors) {
        const uint64_t begin = end;
        end += io::checked_tensor_bytes(spec, "k3");
        header += fmt::format("{}\"{}\":{{\"dtype\":\"{}\",\"shape\":{},\"data_offsets\":[{},{}]}}",
                              begin ? "," : "", spec.name, io::dtype_name(spec.dtype),
                              io::shape_text(spec.shape), begin, end);
      }
      header += '}';
      const uint64_t length = header.size();
      testing::put_file(dir / shard.file, std::string(reinterpret_cast<const char*>(&length), 8) + header);
      std::filesystem::resize_file(dir / shard.file, 8 + length + end);
    }
    io::write_checkpoint_index(dir.path(), plan);
  }
  ::malloc_trim(0);
  const int64_t before = anonymous_kib();
  const io::CheckpointDir checkpoint(dir.path());
  EXPECT_EQ(checkpoint.size(), 497'220);
  const FoundModel found = require_model(config, checkpoint);
  EXPECT_EQ(found.tensors, 497'220);
  EXPECT_EQ(found.vision, 168);
  EXPECT_EQ(found.bytes, checkpoint.declared_size());
  ::malloc_trim(0);
  // 46 MB of names, 2,700 parameters, a header of 5,400 tensors; all headers would be 130 MB more.
  const int64_t grown = anonymous_kib() - before;
#ifndef __SANITIZE_ADDRESS__
  EXPECT_LT(grown, 80 * 1024);
#endif
  RecordProperty("held_kib", static_cast<int>(grown));
}

// The same table said a second time, in Python.
TEST(Layout, AgreesWithAnotherWriter) {
  const ModelConfig config = load_model_config(kFixture);
  const auto expected = specs_of(stored_params(config, io::Dtype::BF16, /*packed=*/true));
  const io::CheckpointDir checkpoint(kFixture);
  int64_t seen = 0;
  checkpoint.for_each([&](const io::StoredTensor& tensor) {
    ++seen;
    ASSERT_TRUE(expected.contains(tensor.name)) << tensor.name;
    EXPECT_EQ(static_cast<const io::TensorSpec&>(tensor), expected.at(tensor.name));
  });
  EXPECT_EQ(seen, static_cast<int64_t>(expected.size()));
  std::map<std::string, std::set<std::string>> files, planned;
  for (const std::string_view name : checkpoint.names())
    files[checkpoint.shard_files().at(checkpoint.shard_of(name))].insert(std::string(name));
  for (const auto& shard :
       plan_files(config, stored_params(config, io::Dtype::BF16, true), /*shard_bytes=*/1)) {
    for (const auto& spec : shard.tensors) planned[shard.file].insert(spec.name);
  }
  EXPECT_EQ(files, planned);

  const FoundModel found = require_model(config, checkpoint);
  EXPECT_EQ(found.tensors, seen);
  EXPECT_EQ(found.vision, 12);  // vision tower and projector: known, and said to be there
}

TEST(StoredNames, FindsExactNamesOnly) {
  const auto params = stored_params(load_model_config(kFixture), io::Dtype::BF16, true);
  const StoredNames names(params);
  const std::string moe = "language_model.model.layers.1.block_sparse_moe.";
  const auto place = names.find(moe + "experts.3.w2.weight_scale");
  ASSERT_TRUE(place.has_value());
  EXPECT_EQ(params[place->param].info.name, moe + "experts.w2.weight");
  EXPECT_EQ(place->piece, 3);
  EXPECT_EQ(place->part, StoredPart::kScale);
  for (const std::string bad :
       {"experts.4.w2.weight", "experts.03.w2.weight", "experts.-1.w2.weight", "experts.w2.weight",
        "experts.+1.w2.weight", "experts.1.w4.weight", "experts.1.w2.weight_", "experts.1.", "experts.",
        "experts.99999999999999999999.w1.weight", "experts.1w2.weight", "gate.weight_packed",
        "shared_experts.gate_proj.weight_scale"})
    EXPECT_FALSE(names.find(moe + bad).has_value()) << bad;
  EXPECT_TRUE(names.find("language_model.model.layers.0.mlp.up_proj.weight").has_value());
  EXPECT_TRUE(names.find("language_model.model.layers.0.block_sparse_moe.up_proj.weight").has_value());
  EXPECT_FALSE(names.find("language_model.model.layers.1.mlp.up_proj.weight").has_value());
}

// A checkpoint of the given specs without any meaning in its bytes.
void write_files(const std::filesystem::path& directory, const std::map<std::string, io::TensorSpec>& specs,
                 uint64_t shard_bytes) {
  std::vector<io::TensorSpec> all;
  for (const auto& [name, spec] : specs) all.push_back(spec);
  io::CheckpointWriter writer(directory, io::plan_shards(all, shard_bytes));
  for (const auto& spec : all)
    writer.append(spec.name, std::vector<std::byte>(io::checked_tensor_bytes(spec, "test")));
  writer.commit();
}

// What find_model says after a change of the tiny model's files.
std::string differences(const std::function<void(std::map<std::string, io::TensorSpec>&)>& change,
                        uint64_t shard_bytes = 1 << 14) {
  const ModelConfig config = test::tiny_config();
  auto specs = specs_of(stored_params(config, io::Dtype::F32, false));
  change(specs);
  const testing::ScratchDir dir;
  write_files(dir.path(), specs, shard_bytes);
  const FoundModel found = find_model(config, io::CheckpointDir(dir.path()));
  if (!found.differences.empty()) {
    testing::expect_error(
        [&] { require_model(config, io::CheckpointDir(dir.path())); },
        {dir.path().string() + ": the tensors do not fit config.json: ", found.differences});
  }
  return found.differences;
}

const std::string kMoe = "language_model.model.layers.1.block_sparse_moe.";

TEST(BadCheckpoint, FitsAsItIs) {
  EXPECT_EQ(differences([](auto&) {}), "");
}

TEST(BadCheckpoint, TheFirstTenAndTheCountOfEachKind) {
  const std::string text = differences([](auto& specs) {
    for (int e = 0; e < 12; ++e) specs.erase(fmt::format("{}experts.{}.w3.weight", kMoe, e));
    for (int e = 12; e < 24; ++e) {
      const std::string name = fmt::format("{}experts.{}.w1.weight", kMoe, e);
      specs[name] = {name, io::Dtype::F32, {8, 16}};
    }
    specs["language_model.model.norm.weight"].shape = {31};
    specs["language_model.lm_head.weight"].dtype = io::Dtype::I32;
    specs[kMoe + "gate.weight"].dtype = io::Dtype::F8_E4M3;
  });
  EXPECT_NE(text.find("12 missing: " + kMoe + "experts.0.w3.weight [8, 16], "), std::string::npos) << text;
  EXPECT_NE(text.find("experts.9.w3.weight [8, 16], ...; 12 unexpected: "), std::string::npos) << text;
  EXPECT_EQ(text.find("experts.10.w3"), std::string::npos) << text;
  EXPECT_NE(text.find("1 of another shape: language_model.model.norm.weight [31] instead of [32]"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("2 of a type that cannot be converted: "), std::string::npos) << text;
  EXPECT_NE(text.find("language_model.lm_head.weight I32"), std::string::npos) << text;
  EXPECT_NE(text.find(kMoe + "gate.weight F8_E4M3"), std::string::npos) << text;
}

TEST(BadCheckpoint, DuplicatesUnderTwoNames) {
  const std::string text = differences([](auto& specs) {
    const std::string name = "language_model.model.layers.0.block_sparse_moe.up_proj.weight";
    specs[name] = {name, io::Dtype::F32, {48, 32}};
  });
  EXPECT_NE(text.find("1 there twice: "), std::string::npos) << text;
  EXPECT_NE(text.find("layers.0."), std::string::npos) << text;
}

TEST(BadCheckpoint, PackedExpertsThatDoNotFit) {
  // An expert both plain and packed; widths that are no multiple of 32; a scale without values.
  std::string text = differences([](auto& specs) {
    const std::string name = kMoe + "experts.2.w1.weight_packed";
    specs[name] = {name, io::Dtype::U8, {8, 8}};
  });
  EXPECT_NE(text.find("MXFP4 needs an input width that is a multiple of 32, not 16"), std::string::npos)
      << text;
  EXPECT_NE(text.find("experts.2.w1.weight beside packed experts"), std::string::npos) << text;

  const ModelConfig config = load_model_config(kFixture);
  auto specs = specs_of(stored_params(config, io::Dtype::BF16, true));
  specs.erase(kMoe + "experts.1.w2.weight_packed");
  specs[kMoe + "experts.2.w2.weight_scale"].dtype = io::Dtype::F8_E8M0;
  specs[kMoe + "experts.3.w2.weight_scale"].shape = {64, 2};
  const testing::ScratchDir dir;
  write_files(dir.path(), specs, 1 << 30);
  text = find_model(config, io::CheckpointDir(dir.path())).differences;
  EXPECT_NE(text.find("1 missing: " + kMoe + "experts.1.w2.weight_packed [64, 16]"), std::string::npos)
      << text;
  EXPECT_NE(text.find(kMoe + "experts.2.w2.weight_scale F8_E8M0"), std::string::npos) << text;
  EXPECT_NE(text.find(kMoe + "experts.3.w2.weight_scale [64, 2] instead of [64, 1]"), std::string::npos)
      << text;
}

TEST(BadCheckpoint, VisionIsThereWholeOrNotAtAll) {
  const ModelConfig config = load_model_config(kFixture);
  const auto all = specs_of(stored_params(config, io::Dtype::BF16, true));
  auto text_only = all;
  std::erase_if(text_only, [](const auto& entry) { return !entry.first.starts_with("language_model."); });
  auto partly = all;
  partly.erase("vision_tower.encoder.blocks.0.wo.weight");
  partly["mm_projector.proj.2.weight"].shape = {32, 63};
  const testing::ScratchDir a, b;
  write_files(a.path(), text_only, 1 << 30);
  write_files(b.path(), partly, 1 << 30);
  EXPECT_EQ(find_model(config, io::CheckpointDir(a.path())).differences, "");
  const std::string text = find_model(config, io::CheckpointDir(b.path())).differences;
  EXPECT_NE(text.find("1 missing: vision_tower.encoder.blocks.0.wo.weight [16, 32]"), std::string::npos)
      << text;
  EXPECT_NE(text.find("mm_projector.proj.2.weight [32, 63] instead of [32, 64]"), std::string::npos) << text;
}

// Odd, but the weights are clear: said, not refused.
TEST(BadCheckpoint, StrayFilesAndAWrongSizeAreSaid) {
  const ModelConfig config = test::tiny_config();
  const testing::ScratchDir dir;
  write_files(dir.path(), specs_of(stored_params(config, io::Dtype::F32, false)), 1 << 14);
  EXPECT_TRUE(find_model(config, io::CheckpointDir(dir.path())).warnings.empty());
  testing::put_file(dir / "other.safetensors", "no matter what");
  const auto path = dir / "model.safetensors.index.json";
  std::string index = read_file(path);
  const std::string size = "\"total_size\": ";
  index.insert(index.find(size) + size.size(), "1");
  testing::put_file(path, index);
  const FoundModel found = require_model(config, io::CheckpointDir(dir.path()));
  ASSERT_EQ(found.warnings.size(), 2u);
  EXPECT_NE(
      found.warnings[0].find("1 files are no part of the checkpoint and are not read: other.safetensors"),
      std::string::npos)
      << found.warnings[0];
  EXPECT_NE(found.warnings[1].find(
                fmt::format("total_size is 1{}, the tensors have {} bytes", found.bytes, found.bytes)),
            std::string::npos)
      << found.warnings[1];
}

// Refused before a mark for every expert is made.
TEST(BadCheckpoint, MoreTensorsThanAnyModelHas) {
  ModelConfig config = load_model_config(kFixture);
  config.layers = 1000;
  config.kda_layer.resize(1000);
  config.moe.experts = 65536;
  testing::expect_error(
      [&] { require_model(config, io::CheckpointDir(kFixture)); },
      {kFixture + ": config.json has ", " tensors, and more than 100000000 are not looked for"});
}

// Packed tensors are MXFP4 only because config.json says so.
TEST(BadCheckpoint, PackedExpertsThatNothingExplains) {
  const testing::ScratchDir dir;
  std::filesystem::copy(kFixture, dir / "k3");
  std::string text = read_file(dir / "k3/config.json");
  const size_t at = text.find("\"quantization_config\"");
  ASSERT_NE(at, std::string::npos);
  text.replace(at + 1, 5, "other");
  testing::put_file(dir / "k3/config.json", text);
  const ModelConfig config = load_model_config((dir / "k3").string());
  testing::expect_error(
      [&] { require_model(config, io::CheckpointDir(dir / "k3")); },
      {"k3: the tensors do not fit config.json: 72 packed without a 'quantization_config': " + kMoe +
       "experts.0.w1.weight_packed, "});
}

// A tensor that lies in a second shard as well, or not where the index says.
TEST(BadCheckpoint, IndexAndShardsThatDisagree) {
  const ModelConfig config = test::tiny_config();
  const testing::ScratchDir dir;
  write_files(dir.path(), specs_of(stored_params(config, io::Dtype::F32, false)), 1 << 14);
  const auto path = dir / "model.safetensors.index.json";
  std::string index = read_file(path);
  const std::string name = "\"language_model.model.norm.weight\": \"model-";
  const size_t at = index.find(name);
  ASSERT_NE(at, std::string::npos);
  char& digit = index[at + name.size() + 4];  // the last of five
  digit = digit == '1' ? '2' : '1';
  testing::put_file(path, index);
  const std::string text = find_model(config, io::CheckpointDir(dir.path())).differences;
  EXPECT_NE(text.find("1 missing: language_model.model.norm.weight"), std::string::npos) << text;
  EXPECT_NE(text.find("1 tensors are not in the shard where the index places them"), std::string::npos)
      << text;
  EXPECT_NE(text.find("1 tensors of the shards are not in the index there"), std::string::npos) << text;
}

}  // namespace
}  // namespace godwit
