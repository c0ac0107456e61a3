#include "godwit/io/checkpoint_dir.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <thread>

#include "tests/io/safetensors_fixture.h"
#include "tests/support/files.h"

namespace godwit::io {
namespace {

using testing::expect_error;
using testing::put_file;
using testing::ScratchDir;

const fs::path kFixtures = fs::path(GODWIT_FIXTURES) / "safetensors";

void write_checkpoint(const fs::path& directory, uint64_t shard_bytes) {
  const auto specs = fixture_tensors();
  CheckpointWriter writer(directory, plan_shards(specs, shard_bytes));
  for (size_t i = 0; i < specs.size(); ++i) writer.append(specs[i].name, as_bytes(fixture_bytes(i)));
  writer.commit();
}

void expect_fixture(const CheckpointDir& checkpoint) {
  const auto specs = fixture_tensors();
  ASSERT_EQ(checkpoint.size(), static_cast<int64_t>(specs.size()));
  for (size_t i = 0; i < specs.size(); ++i) {
    const auto found = checkpoint.at(specs[i].name);
    EXPECT_EQ(static_cast<const TensorSpec&>(*found.tensor), specs[i]);
    EXPECT_EQ(as_text(found.bytes), fixture_bytes(i)) << specs[i].name;
  }
  const auto names = checkpoint.names();
  EXPECT_TRUE(std::ranges::is_sorted(names));
  EXPECT_EQ(compare_specs(specs, checkpoint.specs(), DtypeCheck::kExact).text, "");
  checkpoint.verify();
}

TEST(CheckpointDir, ReadsShardsThatPythonWrote) {
  const CheckpointDir checkpoint(kFixtures / "python_sharded");
  EXPECT_EQ(checkpoint.shard_files().size(), 3u);
  expect_fixture(checkpoint);
}

TEST(CheckpointDir, RoundTripAtEveryShardSize) {
  for (const uint64_t shard_bytes : {1ull, 15ull, 16ull, 64ull, 1ull << 40}) {
    const ScratchDir dir;
    write_checkpoint(dir.path(), shard_bytes);
    const CheckpointDir checkpoint(dir.path());
    expect_fixture(checkpoint);
    EXPECT_EQ(fs::exists(dir / "model.safetensors"), shard_bytes == 1ull << 40);
    expect_error([&] { checkpoint.at("nope"); }, {dir.path().string(), "no tensor 'nope'"});
    EXPECT_TRUE(checkpoint.contains("f32"));
    EXPECT_FALSE(checkpoint.contains("f3"));
  }
}

TEST(CheckpointDir, BytesOutliveTheObject) {
  auto checkpoint = std::make_unique<CheckpointDir>(kFixtures / "python_sharded");
  const auto found = checkpoint->at("u8");
  checkpoint.reset();
  EXPECT_EQ(as_text(found.bytes), fixture_bytes(11));
}

TEST(CheckpointDir, ShardsOpenOnDemandFromManyThreads) {
  const CheckpointDir checkpoint(kFixtures / "python_sharded");
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (const auto& spec : fixture_tensors())
        EXPECT_EQ(checkpoint.at(spec.name).tensor->shape, spec.shape);
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(CheckpointDir, HoldsOneHeader) {
  const ScratchDir dir;
  write_checkpoint(dir.path(), 64);
  const CheckpointDir checkpoint(dir.path());
  ASSERT_NE(checkpoint.shard_of("f64"), checkpoint.shard_of("empty"));
  std::weak_ptr<const SafetensorsFile> first = checkpoint.at("f64").file;
  EXPECT_FALSE(first.expired());
  checkpoint.at("empty");
  EXPECT_TRUE(first.expired());
  std::vector<std::weak_ptr<const MappedFile>> maps;
  int64_t held = 0;
  checkpoint.scan([&](const SafetensorsFile& file, const StoredTensor&) {
    if (maps.empty() || maps.back().lock() != file.mapping()) maps.push_back(file.mapping());
    int64_t open = 0;
    for (const auto& map : maps) open += !map.expired();
    held = std::max(held, open);
  });
  EXPECT_EQ(maps.size(), checkpoint.shard_files().size());
  EXPECT_EQ(held, 1);
}

TEST(CheckpointDir, PlansShardsAsReleased) {
  EXPECT_EQ(shard_file_name(1, 96), "model-00001-of-000096.safetensors");
  EXPECT_EQ(shard_file_name(1, 1), "model.safetensors");
  const std::vector<TensorSpec> specs{{"a", Dtype::U8, {6}},
                                      {"b", Dtype::U8, {4}},
                                      {"c", Dtype::U8, {1}},
                                      {"big", Dtype::U8, {100}},
                                      {"e", Dtype::U8, {0}}};
  const auto shards = plan_shards(specs, 10);
  ASSERT_EQ(shards.size(), 3u);  // a b | c | big e
  EXPECT_EQ(shards[0].tensors.size(), 2u);
  EXPECT_EQ(shards[1].tensors.size(), 1u);
  EXPECT_EQ(shards[2].tensors.size(), 2u);
  EXPECT_EQ(shards[2].file, "model-00003-of-000003.safetensors");
}

TEST(CheckpointDir, WriterRefusesWrongUse) {
  const ScratchDir dir;
  const std::vector<TensorSpec> specs{{"a", Dtype::U8, {3}}, {"b", Dtype::U8, {3}}};
  {
    CheckpointWriter writer(dir.path(), plan_shards(specs, 3));
    writer.append("a", as_bytes("123"));
    expect_error([&] { writer.append("a", as_bytes("4")); },
                 {"model-00001-of-000002", "'a' already has all its bytes"});
    expect_error([&] { writer.append("c", as_bytes("4")); }, {"'c' was not announced"});
    expect_error([&] { writer.commit(); }, {"model-00002-of-000002", "'b' got 0 of its 3 bytes"});
  }
  EXPECT_FALSE(fs::exists(dir / "model.safetensors.index.json"));
  expect_error([&] { CheckpointWriter(dir.path(), plan_shards(specs, 3)); },
               {"already holds a checkpoint", "model-00001"});
  const ScratchDir other;
  expect_error(
      [&] {
        CheckpointWriter(other.path(), {{"../x.safetensors", specs}});
      },
      {"cannot be the name of a shard"});
  expect_error(
      [&] {
        CheckpointWriter(other.path(), {{"x.safetensors", specs}, {"y.safetensors", specs}});
      },
      {"'a' comes twice"});
  EXPECT_EQ(other.entries(), 0);
}

TEST(CheckpointDir, RefusesWhatIsNoCheckpoint) {
  const ScratchDir dir;
  expect_error([&] { CheckpointDir(dir / "absent"); }, {"absent is not a directory"});
  expect_error([&] { CheckpointDir{dir.path()}; },
               {"holds neither model.safetensors nor model.safetensors.index.json"});
  write_checkpoint(dir.path(), 16);
  fs::copy_file(kFixtures / "python_types.safetensors", dir / "model.safetensors");
  expect_error([&] { CheckpointDir{dir.path()}; }, {"holds both"});
}

struct BadIndex {
  const char* text;
  const char* message;
};

TEST(CheckpointDir, RefusesDamagedIndices) {
  const ScratchDir dir;
  put_file(dir / "s.safetensors", "");
  fs::create_directory(dir / "sub");
  put_file(dir / "sub/s.safetensors", "");
  const std::vector<BadIndex> cases{
      {"", "not valid JSON"},
      {"{", "not valid JSON"},
      {"{}", "no weight_map"},
      {"[]", "an array"},
      {"3", "a number"},
      {R"({"weight_map":{}})", "no weight_map with tensors"},
      {R"({"weight_map":[]})", "an array"},
      {R"({"weight_map":"s.safetensors"})", "a string"},
      {R"({"weight_map":{"a":1}})", "a number where the format has none (at 'a')"},
      {R"({"weight_map":{"a":{"b":"s.safetensors"}}})", "an object"},
      {R"({"weight_map":{"a":"s.safetensors"},"weight_map":{"b":"s.safetensors"}})",
       "weight_map comes twice"},
      {R"({"weight_map":{"a":"s.safetensors","b":"s.safetensors","a":"s.safetensors"}})",
       "tensor 'a' comes twice"},
      {R"({"weight_map":{"a":"t.safetensors"}})", "1 of 1 files are absent: t.safetensors"},
      {R"({"weight_map":{"a":"../s.safetensors"}})", "'a' is said to be in \"../s.safetensors\""},
      {R"({"weight_map":{"a":"sub/s.safetensors"}})", "no .safetensors file of the directory"},
      {R"({"weight_map":{"a":"/etc/s.safetensors"}})", "no .safetensors file of the directory"},
      {R"({"weight_map":{"a":"..\\s.safetensors"}})", "no .safetensors file of the directory"},
      {R"({"weight_map":{"a":".safetensors"}})", "no .safetensors file of the directory"},
      {R"({"weight_map":{"a":"s.bin"}})", "no .safetensors file of the directory"},
      {R"({"weight_map":{"a":""}})", "no .safetensors file of the directory"},
      {R"({"weight_map":{"a":"s\u0000.safetensors"}})", "no .safetensors file of the directory"},
      {R"({"weight_map":{"":"s.safetensors"}})", "a tensor name is empty"},
      {R"({"weight_map":{"a\u0007":"s.safetensors"}})", "control characters"},
      {"{\"weight_map\":{\"a\xff\":\"s.safetensors\"}}", "UTF-8"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.text);
    put_file(dir / "model.safetensors.index.json", c.text);
    expect_error([&] { CheckpointDir{dir.path()}; }, {dir.path().string(), c.message});
  }
}

TEST(CheckpointDir, IndexAndShardsMustAgree) {
  const ScratchDir dir;
  write_checkpoint(dir.path(), 64);
  const std::string index = read_file(dir / "model.safetensors.index.json");
  const auto with = [&](std::string_view from, std::string_view to) {
    std::string changed = index;
    changed.replace(changed.find(from), from.size(), to);
    put_file(dir / "model.safetensors.index.json", changed);
  };
  with("\"f32\"", "\"f33\"");
  expect_error([&] { CheckpointDir(dir.path()).at("f33"); },
               {"no tensor 'f33', although the index places it there"});
  with("\"f32\":", "\"zz\": \"model-00001-of-000004.safetensors\", \"f32\":");
  expect_error([&] { CheckpointDir(dir.path()).verify(); },
               {"1 tensors are not in the shard where the index places them: zz in model-00001"});
  const size_t line = index.find("    \"i8\"");
  with(index.substr(line, index.find('\n', line) + 1 - line), "");
  expect_error([&] { CheckpointDir(dir.path()).verify(); },
               {"1 tensors of the shards are not in the index", "i8 in model-"});
  const size_t total = index.find("total_size\": ") + 13;
  with(index.substr(total, index.find('}', total) - total), "1");
  expect_error([&] { CheckpointDir(dir.path()).verify(); }, {"total_size is 1, the tensors have "});
}

TEST(CompareSpecs, NamesTheFirstTenAndTheCount) {
  std::vector<TensorSpec> expected, found;
  for (int i = 10; i < 35; ++i) expected.push_back({fmt::format("w{}", i), Dtype::F32, {i}});
  for (int i = 22; i < 35; ++i)
    found.push_back({fmt::format("w{}", i), i < 25 ? Dtype::BF16 : Dtype::F32, {i == 30 ? 7 : i}});
  found.push_back({"extra", Dtype::F32, {}});
  const auto exact = compare_specs(expected, found, DtypeCheck::kExact);
  EXPECT_EQ(exact.missing, 12);
  EXPECT_EQ(exact.unexpected, 1);
  EXPECT_EQ(exact.misshapen, 1);
  EXPECT_EQ(exact.wrong_dtype, 3);
  EXPECT_EQ(exact.text,
            "12 missing: w10 [10], w11 [11], w12 [12], w13 [13], w14 [14], w15 [15], w16 [16], w17 [17], w18 "
            "[18], w19 [19], ...\n"
            "1 unexpected: extra []\n"
            "1 of another shape: w30 [7] instead of [30]\n"
            "3 of another type: w22 BF16 instead of F32, w23 BF16 instead of F32, w24 BF16 instead of F32");
  EXPECT_EQ(compare_specs(expected, found, DtypeCheck::kIgnore).wrong_dtype, 0);
  EXPECT_TRUE(compare_specs(expected, expected, DtypeCheck::kExact).none());
}

// As many names as the released checkpoint: 92 MoE layers of 896 experts with six tensors each, and the rest.
TEST(CheckpointDir, IndexOfHalfAMillionNames) {
  const ScratchDir dir;
  std::string index = R"({"metadata":{"total_size":1560860324864},"weight_map":{)";
  int64_t count = 0;
  for (int layer = 1; layer <= 92; ++layer) {
    const std::string file = shard_file_name(layer + 1, 96);
    put_file(dir / file, "");
    for (int expert = 0; expert < 896; ++expert) {
      for (const char* part : {"w1.weight_packed", "w1.weight_scale", "w2.weight_packed", "w2.weight_scale",
                               "w3.weight_packed", "w3.weight_scale"}) {
        index += fmt::format("{}\"language_model.model.layers.{}.block_sparse_moe.experts.{}.{}\": \"{}\"",
                             count++ ? ",\n" : "", layer, expert, part, file);
      }
    }
  }
  index += "}}";
  put_file(dir / "model.safetensors.index.json", index);
  const CheckpointDir checkpoint(dir.path());
  EXPECT_EQ(checkpoint.size(), count);
  EXPECT_EQ(checkpoint.declared_size(), 1560860324864u);
  EXPECT_TRUE(
      checkpoint.contains("language_model.model.layers.92.block_sparse_moe.experts.895.w3.weight_scale"));
  EXPECT_FALSE(
      checkpoint.contains("language_model.model.layers.92.block_sparse_moe.experts.896.w3.weight_scale"));
}

}  // namespace
}  // namespace godwit::io
