#include "godwit/train/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "godwit/base/check.h"
#include "godwit/base/file.h"

namespace godwit {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::HasSubstr;

struct TemporaryDirectory {
  TemporaryDirectory() {
    std::string name = (fs::temp_directory_path() / "godwit-metrics-XXXXXX").string();
    path = mkdtemp(name.data());
  }
  ~TemporaryDirectory() { fs::remove_all(path); }
  fs::path path;
};

std::vector<int64_t> steps_of(const fs::path& directory) {
  std::ifstream file(directory / "metrics.jsonl");
  std::vector<int64_t> out;
  for (std::string line; std::getline(file, line);) out.push_back(json::parse(line).at("step"));
  return out;
}

TEST(Metrics, OneObjectAStepWithTheContractsKeysFirst) {
  TemporaryDirectory dir;
  MetricsWriter writer({.directory = dir.path / "run", .tensorboard = false});
  writer.write({{"extra", 1}, {"loss", 2.5}, {"step", 1}, {"stage", "a"}, {"max_vio", {0.5, 1.25}}});
  writer.write({{"step", 2}, {"loss", std::nan("")}});
  EXPECT_EQ(read_file(dir.path / "run" / "metrics.jsonl"),
            "{\"step\":1,\"stage\":\"a\",\"loss\":2.5,\"max_vio\":[0.5,1.25],\"extra\":1}\n"
            "{\"step\":2,\"loss\":null}\n");
  EXPECT_FALSE(fs::exists(dir.path / "run" / "tensorboard"));
}

TEST(Metrics, RowsAreInOrder) {
  TemporaryDirectory dir;
  MetricsWriter writer({.directory = dir.path, .tensorboard = false});
  writer.write({{"step", 1}, {"loss", 1}});
  writer.write({{"step", 2}, {"loss", 2}});
  EXPECT_THROW(writer.write({{"step", 2}}), Error);
  EXPECT_THROW(writer.write({{"step", 1}}), Error);
  EXPECT_THROW(writer.write({{"loss", 1}}), Error);
  EXPECT_EQ(steps_of(dir.path), (std::vector<int64_t>{1, 2}));
}

TEST(Metrics, ResumeDropsLaterStepsAndACutLine) {
  TemporaryDirectory dir;
  {
    MetricsWriter writer({.directory = dir.path, .tensorboard = false});
    for (int step = 1; step <= 5; ++step) writer.write({{"step", step}, {"loss", step}});
    std::ofstream(dir.path / "metrics.jsonl", std::ios::app) << "{\"step\":6,\"lo";
  }
  MetricsWriter writer({.directory = dir.path, .tensorboard = false});
  writer.truncate_after(5);
  EXPECT_EQ(steps_of(dir.path), (std::vector<int64_t>{1, 2, 3, 4, 5}));
  writer.truncate_after(3);
  EXPECT_EQ(steps_of(dir.path), (std::vector<int64_t>{1, 2, 3}));
  EXPECT_THROW(writer.write({{"step", 3}}), Error);
  writer.write({{"step", 4}, {"loss", 40}});
  EXPECT_EQ(steps_of(dir.path), (std::vector<int64_t>{1, 2, 3, 4}));
  // Whatever a power cut left behind the row that counts is nobody's business.
  std::ofstream(dir.path / "metrics.jsonl", std::ios::app) << std::string(100, '\0') << "\nnot json\n";
  writer.truncate_after(4);
  EXPECT_EQ(steps_of(dir.path), (std::vector<int64_t>{1, 2, 3, 4}));
  writer.truncate_after(0);
  EXPECT_EQ(fs::file_size(dir.path / "metrics.jsonl"), 0u);
}

TEST(Metrics, RefusesAFileThatIsNotItsOwn) {
  TemporaryDirectory dir;
  const auto error_of = [&](const std::string& text) -> std::string {
    write_file(dir.path / "metrics.jsonl", text);
    MetricsWriter writer({.directory = dir.path, .tensorboard = false});
    try {
      writer.truncate_after(9);
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_THAT(error_of("{\"step\":1}\nnot json\n"),
              HasSubstr("metrics.jsonl:2: expected a JSON object with a step"));
  EXPECT_THAT(error_of("{\"step\":2}\n{\"step\":2}\n"),
              HasSubstr("metrics.jsonl:2: step 2 comes after step 2"));
  EXPECT_EQ(error_of("{\"step\":1}\n"), "no error");
}

// ---- TensorBoard
// --------------------------------------------------------------------------------------------

TEST(TensorBoard, Crc32cOfTheStandardVectors) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283U);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aaU);  // RFC 3720 B.4
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43U);
  EXPECT_EQ(crc32c(""), 0U);
}

std::string hex(const std::string& bytes) {
  std::string out;
  for (const char c : bytes) out += fmt::format("{:02x}", static_cast<uint8_t>(c));
  return out;
}

// From python/make_event_fixture.py with tensorboard 2.21.
TEST(TensorBoard, RecordsAreByteForByteThoseOfTensorBoard) {
  EXPECT_EQ(hex(version_record(1700000000.5)),
            "1800000000000000a37f4b220900002040fc54d9411a0d627261696e2e4576656e743a322b353110");
  EXPECT_EQ(hex(start_record(1700000000.5, 300)),
            "100000000000000095fbfe180900002040fc54d94110ac023a020801b94512a3");
  EXPECT_EQ(hex(scalars_record(1700000001.25, 300, {{"loss", 2.5f}, {"max_vio/max", 0.125f}})),
            "2f000000000000006d5d1d500900005040fc54d94110ac022a210a0b0a046c6f737315000020400a120a0b6d"
            "61785f76696f2f6d6178150000003ee7c906d9");
}

TEST(TensorBoard, TheWriterFlattensListsAndStartsANewFileAWriter) {
  TemporaryDirectory dir;
  for (int run = 0; run < 2; ++run) {
    MetricsWriter writer({.directory = dir.path});
    writer.truncate_after(run);
    writer.write({{"step", run + 1},
                  {"stage", "text"},
                  {"loss", 2.5},
                  {"max_vio", {1.0, 3.0}},
                  {"none", json::array()}});
  }
  int files = 0;
  for (const auto& entry : fs::directory_iterator(dir.path / "tensorboard")) {
    ++files;
    const std::string bytes = read_file(entry.path().string());
    uint64_t length = 0;
    std::memcpy(&length, bytes.data(), 8);
    EXPECT_EQ(bytes.substr(12 + 9, length - 9), std::string("\x1a\x0d") + "brain.Event:2");
    for (const char* tag : {"loss", "max_vio/max", "max_vio/mean"}) EXPECT_THAT(bytes, HasSubstr(tag));
    EXPECT_EQ(bytes.find("stage"), std::string::npos);
    EXPECT_EQ(bytes.find("none"), std::string::npos);
  }
  EXPECT_EQ(files, 2);
}

}  // namespace
}  // namespace godwit
