#include <gtest/gtest.h>
#include <zstd.h>

#include <nlohmann/json.hpp>

#include "godwit/io/jsonl.h"
#include "godwit/io/text_file.h"
#include "tests/support/files.h"

namespace godwit::io {
namespace {

using testing::expect_error;
using testing::put_file;
using testing::ScratchDir;

std::string compressed(std::string_view text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress(out.data(), out.size(), text.data(), text.size(), /*level=*/3));
  return out;
}

std::vector<std::string> lines_of(const fs::path& path) {
  LineReader reader(path);
  std::vector<std::string> lines;
  while (const auto line = reader.next()) {
    lines.emplace_back(*line);
    EXPECT_EQ(reader.line_number(), static_cast<int64_t>(lines.size()));
  }
  return lines;
}

TEST(TextFile, PlainAndCompressedAreTheSame) {
  const ScratchDir dir;
  std::string text;
  for (int i = 0; i < 200'000; ++i) text += fmt::format("{} ", i * 7919);
  for (const std::string& content : {std::string(), std::string("x"), text}) {
    put_file(dir / "a.txt", content);
    put_file(dir / "a.txt.zst", compressed(content));
    const size_t half = content.size() / 2;
    put_file(dir / "two.zst", compressed(content.substr(0, half)) + compressed(content.substr(half)));
    EXPECT_EQ(read_text(dir / "a.txt"), content);
    EXPECT_EQ(read_text(dir / "a.txt.zst"), content);
    EXPECT_EQ(read_text(dir / "two.zst"), content);
  }
  TextSource source(dir / "a.txt.zst");
  std::string piece(1000, '\0');
  while (source.read(piece.data(), piece.size()) > 0) {
  }
  EXPECT_EQ(source.consumed(), source.file_size());
}

TEST(TextFile, RefusesDamagedCompression) {
  const ScratchDir dir;
  const std::string whole = compressed(std::string(100'000, 'a') + "tail that differs");
  for (size_t size = 1; size < whole.size(); ++size) {
    put_file(dir / "x.zst", std::string_view(whole).substr(0, size));
    expect_error([&] { read_text(dir / "x.zst"); }, {"x.zst: ", "truncated zstd data"});
  }
  put_file(dir / "x.zst", "plain text, not compressed");
  expect_error([&] { read_text(dir / "x.zst"); }, {"x.zst: damaged zstd data"});
  put_file(dir / "x.zst", whole + "rubbish");
  expect_error([&] { read_text(dir / "x.zst"); }, {"x.zst: "});
  expect_error([&] { read_text(dir / "absent"); }, {"absent", "No such file"});
  expect_error([&] { read_text(dir.path()); }, {"it is a directory"});
}

TEST(LineReader, EveryKindOfEnd) {
  const ScratchDir dir;
  const auto lines = [&](std::string_view text) {
    put_file(dir / "x", text);
    return lines_of(dir / "x");
  };
  using Lines = std::vector<std::string>;
  EXPECT_EQ(lines(""), Lines{});
  EXPECT_EQ(lines("a"), Lines{"a"});
  EXPECT_EQ(lines("a\n"), Lines{"a\n"});
  EXPECT_EQ(lines("a\n\nb"), (Lines{"a\n", "\n", "b"}));
  EXPECT_EQ(lines("\n"), Lines{"\n"});
  EXPECT_EQ(lines("a\r\nb\r\n"), (Lines{"a\r\n", "b\r\n"}));
  EXPECT_EQ(lines(std::string_view("a\0b\nc", 5)), (Lines{std::string("a\0b\n", 4), "c"}));
  const std::string longer(1 << 20, 'l');  // several times the buffer
  EXPECT_EQ(lines(longer + "\n" + longer), (Lines{longer + "\n", longer}));
}

TEST(Jsonl, ReadsValuesAndNamesTheLine) {
  const ScratchDir dir;
  const std::string text = "{\"text\": \"a\\nb\"}\n\n  \n{\"text\": 3}\r\n{\"x\": 1}\n[1]\n{\"text\": \"cut";
  put_file(dir / "x.jsonl", text);
  put_file(dir / "x.jsonl.zst", compressed(text));
  for (const char* name : {"x.jsonl", "x.jsonl.zst"}) {
    JsonlReader reader(dir / name);
    nlohmann::json value;
    const std::string file = (dir / name).string();
    ASSERT_TRUE(reader.next(value));
    EXPECT_EQ(json_text(value, "text", reader.where()), "a\nb");
    ASSERT_TRUE(reader.next(value));
    expect_error([&] { json_text(value, "text", reader.where()); },
                 {file + ":4: \"text\" is a number, not a string"});
    ASSERT_TRUE(reader.next(value));
    expect_error([&] { json_text(value, "text", reader.where()); },
                 {file + ":5: the object has no \"text\""});
    ASSERT_TRUE(reader.next(value));
    expect_error([&] { json_text(value, "text", reader.where()); },
                 {file + ":6: expected a JSON object, got array"});
    expect_error([&] { reader.next(value); }, {file + ":7: not valid JSON"});
  }
}

TEST(Jsonl, DeepNestingIsAnErrorNotAStackOverflow) {
  const ScratchDir dir;
  const auto read = [&](const std::string& text) {
    put_file(dir / "x.jsonl", text + "\n");
    JsonlReader reader(dir / "x.jsonl");
    nlohmann::json value;
    reader.next(value);
  };
  const auto brackets = [](size_t n) { return std::string(n, '[') + std::string(n, ']'); };
  read(brackets(256));
  read("[\"" + std::string(300, '[') + "\\\"" + std::string(300, '{') + "\", [], [], {}]");  // text
  expect_error([&] { read(brackets(257)); }, {"x.jsonl:1: JSON nested deeper than 256"});
  expect_error([&] { read("{\"content\": " + brackets(2'000'000) + "}"); },
               {"x.jsonl:1: JSON nested deeper"});
  put_file(dir / "x.json", "{\"a\": " + brackets(2'000'000) + "}");
  expect_error([&] { read_json(dir / "x.json"); }, {"x.json: JSON nested deeper"});
}

}  // namespace
}  // namespace godwit::io
