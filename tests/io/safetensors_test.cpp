#include "godwit/io/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>

#include "godwit/base/rng.h"
#include "tests/io/safetensors_fixture.h"
#include "tests/support/files.h"

namespace godwit::io {
namespace {

using testing::expect_error;
using testing::put_file;
using testing::ScratchDir;

const fs::path kFixtures = fs::path(GODWIT_FIXTURES) / "safetensors";

void expect_fixture_tensors(const SafetensorsFile& file) {
  const auto specs = fixture_tensors();
  ASSERT_EQ(file.tensors().size(), specs.size());
  for (size_t i = 0; i < specs.size(); ++i) {
    const StoredTensor& stored = file.at(specs[i].name);
    EXPECT_EQ(static_cast<const TensorSpec&>(stored), specs[i]);
    EXPECT_EQ(as_text(file.bytes(stored)), fixture_bytes(i)) << specs[i].name;
  }
  EXPECT_EQ(file.metadata(), kFixtureMetadata);
}

// A file of this header and `data` bytes of data; the length field may lie.
fs::path write_raw(const ScratchDir& dir, std::string_view header, size_t data, int64_t length = -1) {
  const uint64_t n = length < 0 ? header.size() : static_cast<uint64_t>(length);
  std::string content(8, '\0');
  std::memcpy(content.data(), &n, 8);
  content += header;
  content.append(data, 'd');
  put_file(dir / "x.safetensors", content);
  return dir / "x.safetensors";
}

TEST(Safetensors, ReadsWhatPythonWrote) {
  expect_fixture_tensors(SafetensorsFile(kFixtures / "python_types.safetensors"));
}

// Byte for byte the committed file, which `python/make_safetensors_fixtures.py --check` reads with the Python
// package.
TEST(Safetensors, WritesWhatPythonReads) {
  const ScratchDir dir;
  const auto specs = fixture_tensors();
  SafetensorsWriter writer(dir / "x.safetensors", specs, kFixtureMetadata);
  for (size_t i = specs.size(); i-- > 0;) {  // not in the order of the file, and in pieces
    const std::string bytes = fixture_bytes(i);
    for (size_t at = 0; at < bytes.size(); at += 5)
      writer.append(specs[i].name, as_bytes(std::string_view(bytes).substr(at, 5)));
  }
  writer.commit();
  const SafetensorsFile file(dir / "x.safetensors");
  expect_fixture_tensors(file);
  for (const auto& tensor : file.tensors())
    EXPECT_EQ(tensor.begin % dtype_size(tensor.dtype), 0u) << tensor.name;
  EXPECT_EQ(read_file(dir / "x.safetensors"), read_file(kFixtures / "godwit_types.safetensors"));
}

TEST(Safetensors, NoTensorsAtAll) {
  const ScratchDir dir;
  SafetensorsWriter(dir / "x.safetensors", {}).commit();
  EXPECT_TRUE(SafetensorsFile(dir / "x.safetensors").tensors().empty());
}

TEST(Safetensors, WriterRefusesWrongUse) {
  const ScratchDir dir;
  const fs::path path = dir / "x.safetensors";
  const std::vector<TensorSpec> two{{"a", Dtype::F32, {2}}, {"b", Dtype::U8, {3}}};
  const auto bytes = [](size_t n) {
    return Bytes(reinterpret_cast<const std::byte*>("0123456789abcdef"), n);
  };
  expect_error([&] { SafetensorsWriter(path, two).append("c", bytes(1)); },
               {path.string(), "'c' was not announced"});
  expect_error([&] { SafetensorsWriter(path, two).append("a", bytes(9)); },
               {path.string(), "'a' F32 [2] has 8 bytes", "9 more"});
  expect_error(
      [&] {
        SafetensorsWriter writer(path, two);
        writer.append("a", bytes(8));
        writer.append("b", bytes(2));
        writer.commit();
      },
      {path.string(), "'b' got 2 of its 3 bytes"});
  expect_error(
      [&] {
        SafetensorsWriter(path, {{"a", Dtype::U8, {1}}, {"a", Dtype::U8, {1}}});
      },
      {"'a' comes twice"});
  expect_error([&] { SafetensorsWriter(path, {{"", Dtype::U8, {1}}}); }, {"cannot be the name"});
  expect_error([&] { SafetensorsWriter(path, {{"__metadata__", Dtype::U8, {1}}}); }, {"cannot be the name"});
  expect_error([&] { SafetensorsWriter(path, {{"a\xff", Dtype::U8, {1}}}); }, {"not UTF-8"});
  expect_error(
      [&] {
        SafetensorsWriter(path, {{"a", Dtype::U8, {-1}}});
      },
      {"'a' has the impossible shape [-1]"});
  expect_error(
      [&] {
        SafetensorsWriter(path, {{"a", Dtype::U8, {1LL << 40, 1LL << 40}}});
      },
      {"impossible shape"});
  EXPECT_EQ(dir.entries(), 0);
}

TEST(Safetensors, FullDiskNamesTheFileBeforeAnyWork) {
  const testing::SmallDisk disk(64);
  if (!disk.mounted()) GTEST_SKIP() << "mounting a small file system needs root";
  const fs::path path = disk.path() / "x.safetensors";
  expect_error(
      [&] {
        SafetensorsWriter(path, {{"a", Dtype::F32, {1 << 20}}});
      },
      {path.string(), "No space left"});
}

struct BadHeader {
  const char* header;
  size_t data;
  const char* message;
};

TEST(Safetensors, RefusesDamagedHeaders) {
  const ScratchDir dir;
  const std::vector<BadHeader> cases{
      {"", 0, "does not begin with '{'"},
      {"[]", 0, "does not begin with '{'"},
      {" {}", 0, "does not begin with '{'"},
      {"{", 0, "not valid JSON"},
      {"{}x", 0, "not valid JSON"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]})", 4, "not valid JSON"},
      {R"({"a":1})", 0, "a number"},
      {R"({"a":null})", 0, "null"},
      {R"({"a":[]})", 0, "an array"},
      {R"({"a":{}})", 0, "'a' has no dtype"},
      {R"({"a":{"dtype":"F32","shape":[1]}})", 4, "'a' has no data_offsets"},
      {R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", 4, "'a' has no shape"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1}})", 4, "'a' has the unknown key 'x'"},
      {R"({"a":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}})", 4, "'a' has 'shape' twice"},
      {R"({"a":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}})", 4, "'a' has the unknown dtype 'F33'"},
      {R"({"a":{"dtype":4,"shape":[1],"data_offsets":[0,4]}})", 4, "a number"},
      {R"({"a":{"dtype":"F32","shape":1,"data_offsets":[0,4]}})", 4, "a number"},
      {R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4, "a negative number"},
      {R"({"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})", 4, "no integer"},
      {R"({"a":{"dtype":"F32","shape":["1"],"data_offsets":[0,4]}})", 4, "a string"},
      {R"({"a":{"dtype":"F32","shape":[[1]],"data_offsets":[0,4]}})", 4, "an array"},
      {R"({"a":{"dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,4]}})", 4,
       "'a' has a dimension of 9223372036854775808"},
      {R"({"a":{"dtype":"F32","shape":[1e30],"data_offsets":[0,4]}})", 4, "no integer"},
      {R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}})", 4,
       "impossible shape [4294967296, 4294967296]"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4,
       "'a' F32 [2] needs 8 bytes, its data_offsets give 4"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}})", 4, "1 data_offsets instead of 2"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}})", 8, "3 data_offsets instead of 2"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", 4, "'a' lies at bytes 4 to 0 of 4"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 3, "'a' lies at bytes 0 to 4 of 3"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 5, "1 bytes after the last tensor"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}})", 5, "1 bytes before tensor 'a'"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[5,9]}})",
       9, "1 bytes before tensor 'b'"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}})",
       7, "'a' and 'b' overlap at byte 3"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
       8, "'a' comes twice"},
      {R"({"":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 4, "a tensor name is empty"},
      {R"({"a\u0000b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 4, "control characters"},
      {"{\"a\xff\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4, "UTF-8"},
      {R"({"a\ud800":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 4, "not valid JSON"},
      {R"({"__metadata__":{"a":1}})", 0, "a number"},
      {R"({"__metadata__":{"a":{}}})", 0, "an object"},
      {R"({"__metadata__":{"a":"1","a":"2"}})", 0, "metadata key 'a' comes twice"},
      {R"({"__metadata__":{},"__metadata__":{}})", 0, "__metadata__ comes twice"},
      {R"({"__metadata__":"x"})", 0, "a string"},
  };
  for (const auto& c : cases) {
    const fs::path path = write_raw(dir, c.header, c.data);
    SCOPED_TRACE(c.header);
    expect_error([&] { SafetensorsFile{path}; }, {path.string(), c.message});
  }
}

TEST(Safetensors, RefusesLyingHeaderLengths) {
  const ScratchDir dir;
  expect_error([&] { SafetensorsFile(write_raw(dir, "{}", 0, 3)); },
               {"truncated: the header has 3 bytes, only 2 follow"});
  expect_error([&] { SafetensorsFile(write_raw(dir, "{}", 0, kMaxSafetensorsHeader + 1)); },
               {"exceeds the limit"});
  expect_error([&] { SafetensorsFile(write_raw(dir, "{}", 0, INT64_MAX)); }, {"exceeds the limit"});
  expect_error([&] { SafetensorsFile(write_raw(dir, "{}", 0, 0)); }, {"does not begin"});
  put_file(dir / "y", std::string_view("\x02\0\0\0\0\0\0", 7));
  expect_error([&] { SafetensorsFile(dir / "y"); }, {"7 bytes are too few"});
  put_file(dir / "y", std::string_view());
  expect_error([&] { SafetensorsFile(dir / "y"); }, {"0 bytes are too few"});
}

TEST(Safetensors, RefusesEveryTruncation) {
  const ScratchDir dir;
  const std::string whole = read_file(kFixtures / "python_types.safetensors");
  for (size_t size = 0; size < whole.size(); ++size) {
    put_file(dir / "x", std::string_view(whole).substr(0, size));
    EXPECT_THROW(SafetensorsFile(dir / "x"), Error) << size;
  }
}

// Any damage either is refused or leaves a file whose tensors all lie inside it.
TEST(Safetensors, RandomDamageNeverReachesOutside) {
  const ScratchDir dir;
  const std::string whole = read_file(kFixtures / "python_types.safetensors");
  const size_t header = whole.size() - 300;  // most changes hit the header
  int refused = 0;
  for (uint64_t trial = 0; trial < 300; ++trial) {
    std::string damaged = whole;
    for (uint64_t k = 0; k <= trial % 3; ++k) {
      damaged[random_bits(1, trial, 2 * k) % header] = static_cast<char>(random_bits(1, trial, 2 * k + 1));
    }
    put_file(dir / "x", damaged);
    try {
      const SafetensorsFile file(dir / "x");
      for (const auto& tensor : file.tensors()) EXPECT_LE(tensor.end, damaged.size());
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 200);
}

// Every contradiction of a header in one error: the first ten and the count.
TEST(Safetensors, ManyFaultsAreOneError) {
  const ScratchDir dir;
  std::string header;
  for (int i = 0; i < 15; ++i) {  // each should end at 4 i + 4
    header += fmt::format("{}\"t{:02}\":{{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[{},{}]}}",
                          i ? "," : "{", i, 4 * i, 4 * i + (i == 0 ? 4 : 5));
  }
  const fs::path path = write_raw(dir, header + "}", 200);
  expect_error([&] { SafetensorsFile{path}; },
               {path.string() +
                    ": 14 faults: tensor 't01' F32 [1] needs 4 bytes, its data_offsets give 5; tensor 't02'",
                "tensor 't10'", "; ..."});
  const fs::path overlaps = write_raw(dir,
                                      R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                                      R"("b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]},)"
                                      R"("c":{"dtype":"U8","shape":[1],"data_offsets":[7,8]}})",
                                      9);
  expect_error(
      [&] { SafetensorsFile{overlaps}; },
      {"3 faults: tensors 'a' and 'b' overlap at byte 2 of the data; 1 bytes before tensor 'c' belong to no "
       "tensor; 1 bytes after the last tensor belong to no tensor"});
}

}  // namespace
}  // namespace godwit::io
