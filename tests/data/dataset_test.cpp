#include "godwit/data/dataset.h"

#include <gtest/gtest.h>

#include <cstring>

#include "godwit/base/check.h"
#include "tests/data/small_dataset.h"
#include "tests/support/files.h"

namespace godwit::data {
namespace {

using testing::expect_error;
using testing::put_file;
using testing::ScratchDir;

TEST(TokenDataset, DocumentsComeBack) {
  const ScratchDir dir;
  const std::vector<uint64_t> lengths{5, 0, 1, 64, 0, 0, 17, 3};
  const auto dataset = small_dataset(dir / "d", lengths);
  EXPECT_EQ(dataset->manifest().shards.size(), 3u);
  ASSERT_EQ(dataset->documents(), lengths.size());
  EXPECT_EQ(dataset->tokens(), 90u);
  EXPECT_EQ(dataset->text_bytes(), 270u);
  for (uint64_t d = 0; d < lengths.size(); ++d) {
    ASSERT_EQ(dataset->document_tokens(d), lengths[d]);
    EXPECT_EQ(dataset->document_text_bytes(d), 3 * lengths[d]);
    std::vector<int64_t> ids(lengths[d]);
    dataset->copy_tokens(d, 0, ids);
    for (uint64_t i = 0; i < lengths[d]; ++i) ASSERT_EQ(ids[i], small_token(d, i));
  }
  std::vector<int64_t> two(2);
  dataset->copy_tokens(3, 62, two);
  EXPECT_EQ(two[1], small_token(3, 63));
  expect_error([&] { dataset->copy_tokens(3, 63, two); }, {"tokens 63 to 65 of document 3, which has 64"});
  expect_error([&] { dataset->document_tokens(8); }, {"document 8 of 8"});
  dataset->verify();
}

TEST(TokenDataset, TokenWidthFollowsTheVocabulary) {
  const ScratchDir dir;
  for (const int64_t vocab : {65536, 65537, 163840}) {
    Manifest manifest{"hash", vocab, 0, {}, {}};
    ShardWriter writer(dir / "shard-00000.gwt", vocab);
    const std::vector<int32_t> ids{0, 1, static_cast<int32_t>(vocab - 1)};
    writer.add_document(ids, 7);
    expect_error([&] { writer.add_document(std::vector<int32_t>{static_cast<int32_t>(vocab)}, 1); },
                 {"shard-00000.gwt: token id", "of document 1", "outside the vocabulary"});
    expect_error([&] { writer.add_document(std::vector<int32_t>{-1}, 1); }, {"token id -1"});
    manifest.shards.push_back(writer.finish());
    write_manifest(dir.path(), manifest);
    const TokenDataset dataset(dir.path());
    std::vector<int64_t> back(3);
    dataset.copy_tokens(0, 0, back);
    EXPECT_EQ(back, (std::vector<int64_t>{0, 1, vocab - 1}));
    EXPECT_EQ(fs::file_size(dir / "shard-00000.gwt"), 64u + (vocab > 65536 ? 16 : 8) + 32);
  }
}

TEST(TokenDataset, RefusesEveryTruncationAndEveryDamagedHeaderByte) {
  const ScratchDir dir;
  small_dataset(dir / "d", {5, 3, 9});
  const fs::path shard = dir / "d/shard-00000.gwt";
  const std::string whole = read_file(shard);
  for (size_t size = 0; size < whole.size(); ++size) {
    put_file(shard, std::string_view(whole).substr(0, size));
    expect_error([&] { TokenDataset(dir / "d"); }, {shard.string()});
  }
  put_file(shard, whole + "x");
  expect_error([&] { TokenDataset(dir / "d"); }, {shard.string(), "truncated?"});
  for (size_t i = 0; i < 64; ++i) {
    std::string damaged = whole;
    damaged[i] = static_cast<char>(damaged[i] ^ 1);
    put_file(shard, damaged);
    expect_error([&] { TokenDataset(dir / "d"); }, {shard.string(), i < 8    ? "wrong magic"
                                                                    : i < 12 ? "version"
                                                                             : "the header is damaged"});
  }
}

TEST(TokenDataset, ChecksumFindsEveryDamagedByte) {
  const ScratchDir dir;
  small_dataset(dir / "d", {5, 3, 9});
  const fs::path shard = dir / "d/shard-00000.gwt";
  const std::string whole = read_file(shard);
  for (size_t i = 64; i < whole.size(); ++i) {
    std::string damaged = whole;
    damaged[i] = static_cast<char>(damaged[i] ^ 0x40);
    put_file(shard, damaged);
    expect_error([&] { TokenDataset(dir / "d").verify(); }, {shard.string(), "damaged"});
  }
}

TEST(TokenDataset, TokensOutsideTheVocabularyNeverLeave) {
  const ScratchDir dir;
  small_dataset(dir / "d", {5});
  const fs::path shard = dir / "d/shard-00000.gwt";
  std::string damaged = read_file(shard);
  damaged[64] = damaged[65] = '\xff';  // the first token becomes 65535 of 65000
  put_file(shard, damaged);
  const TokenDataset dataset(dir / "d");
  std::vector<int64_t> ids(5);
  expect_error([&] { dataset.copy_tokens(0, 0, ids); },
               {shard.string(), "document 0", "outside the vocabulary of 65000"});
}

TEST(TokenDataset, RefusesDamagedManifests) {
  const ScratchDir dir;
  small_dataset(dir / "d", {5, 3, 9, 4});
  const fs::path path = dir / "d/manifest.json";
  const std::string whole = read_file(path);
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = whole;
    text.replace(text.find(from), from.size(), to);
    put_file(path, text);
  };
  const auto expect = [&](const std::string& message) {
    expect_error([&] { TokenDataset(dir / "d"); }, {(dir / "d").string(), message});
  };
  with("\"version\": 1", "\"version\": 2");
  expect("version 2");
  with("godwit-tokens", "godwit-corpus");
  expect("expected format godwit-tokens");
  with("shard-00001.gwt", "../shard.gwt");
  expect("a shard outside the directory");
  with("shard-00001.gwt", "shard-00000.gwt");
  expect("is not the shard that");
  with("\"tokens\": 21", "\"tokens\": 22");
  expect("not the sums");
  with("\"eos_id\"", "\"eos\"");
  expect("not a manifest");
  with("{", "[");
  expect("not valid JSON");
  fs::remove(path);
  expect("manifest.json");
}

TEST(TokenDataset, FingerprintFollowsTheContentNotThePlace) {
  const ScratchDir dir;
  const auto a = small_dataset(dir / "a", {5, 3, 9, 4});
  fs::copy(dir / "a", dir / "b");
  EXPECT_EQ(TokenDataset(dir / "b").fingerprint(), a->fingerprint());
  EXPECT_NE(small_dataset(dir / "c", {5, 3, 9, 5})->fingerprint(), a->fingerprint());
}

}  // namespace
}  // namespace godwit::data
