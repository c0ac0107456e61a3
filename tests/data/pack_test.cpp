#include "godwit/data/pack.h"

#include <gtest/gtest.h>
#include <zstd.h>

#include <algorithm>

#include "godwit/base/file.h"
#include "godwit/base/parallel.h"
#include "godwit/data/dataset.h"
#include "tests/support/files.h"

namespace godwit::data {
namespace {

using testing::expect_error;
using testing::put_file;
using testing::ScratchDir;

// One token a byte; 256 ends a document.
PackTokenizer byte_tokenizer() {
  return {.encode =
              [](std::string_view text, std::vector<int32_t>& ids) {
                for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
              },
          .vocab_size = 300,
          .eos_id = 256,
          .hash = "bytes"};
}

PackOptions options_for(const ScratchDir& dir, const std::vector<std::string>& inputs) {
  PackOptions options;
  for (const auto& input : inputs) options.inputs.push_back(dir / input);
  options.out = dir / "out";
  options.tokenizer = byte_tokenizer();
  return options;
}

std::vector<std::string> documents_of(const TokenDataset& dataset) {
  std::vector<std::string> documents;
  for (uint64_t d = 0; d < dataset.documents(); ++d) {
    std::vector<int64_t> ids(dataset.document_tokens(d));
    dataset.copy_tokens(d, 0, ids);
    EXPECT_EQ(ids.back(), 256);
    std::string text;
    for (size_t i = 0; i + 1 < ids.size(); ++i) text += static_cast<char>(ids[i]);
    EXPECT_EQ(dataset.document_text_bytes(d), text.size());
    documents.push_back(text);
  }
  return documents;
}

using Texts = std::vector<std::string>;

TEST(Pack, DocumentsOfEveryKindOfFile) {
  const ScratchDir dir;
  put_file(dir / "one.txt", "whole\nfile\n");
  put_file(dir / "many.txt",
           "\xEF\xBB\xBF"
           "a\nb\n\f\nc\f\n\f\r\n\f\n\fd\n\f");
  put_file(dir / "x.jsonl", "{\"text\": \"j\\u00e9\\n\", \"id\": 1}\n\n{\"text\": \"\"}\n{\"text\": \"k\"}");
  std::string zst(1000, '\0');
  zst.resize(ZSTD_compress(zst.data(), zst.size(), "z1\n\f\nz2", 7, 3));
  put_file(dir / "z.txt.zst", zst);
  fs::create_directories(dir / "tree/sub");
  put_file(dir / "tree/b.c", "b.c");
  put_file(dir / "tree/sub/a.c", "a.c");
  put_file(dir / "tree/.hidden", "no");
  put_file(dir / "tree/binary", std::string_view("n\0o", 3));
  const PackSummary summary =
      pack_corpus(options_for(dir, {"one.txt", "many.txt", "x.jsonl", "z.txt.zst", "tree"}));
  const TokenDataset dataset(dir / "out");
  const Texts expected{"whole\nfile\n", "a\nb\n", "c\f\n", "\fd\n", "j\u00e9\n", "k",
                       "z1\n",          "z2",     "b.c",   "a.c"};
  EXPECT_EQ(documents_of(dataset), expected);
  EXPECT_EQ(summary.train.documents, expected.size());
  EXPECT_EQ(summary.train.tokens, dataset.tokens());
  EXPECT_EQ(summary.train.text_bytes, dataset.text_bytes());
  EXPECT_EQ(summary.empty_documents, 3u);
  EXPECT_EQ(dataset.manifest().eos_id, 256);
  EXPECT_EQ(dataset.manifest().tokenizer_hash, "bytes");
  EXPECT_EQ(open_heldout(dir / "out"), nullptr);
  EXPECT_EQ(open_train(dir / "out")->documents(), expected.size());
  dataset.verify();
}

TEST(Pack, BosAndShardsAndProgress) {
  const ScratchDir dir;
  put_file(dir / "x.txt", "aaaa\n\f\nbbbb\n\f\ncc");
  auto options = options_for(dir, {"x.txt"});
  options.tokenizer.bos_id = 257;
  options.shard_tokens = 8;
  uint64_t last = 0, total = 0;
  options.progress = [&](uint64_t done, uint64_t all) {
    EXPECT_GE(done, last);
    last = done;
    total = all;
  };
  pack_corpus(options);
  EXPECT_EQ(last, 16u);
  EXPECT_EQ(total, 16u);
  const TokenDataset dataset(dir / "out");
  EXPECT_EQ(dataset.manifest().shards.size(), 3u);
  EXPECT_EQ(dataset.manifest().bos_id, 257);
  std::vector<int64_t> ids(4);
  dataset.copy_tokens(2, 0, ids);
  EXPECT_EQ(ids, (std::vector<int64_t>{257, 'c', 'c', 256}));
}

TEST(Pack, HoldsOutByHash) {
  const ScratchDir dir;
  std::string lines;
  for (int i = 0; i < 400; ++i)
    lines += fmt::format("{{\"text\": \"document {}\"}}\n", i % 390);  // ten copies
  put_file(dir / "x.jsonl", lines);
  auto options = options_for(dir, {"x.jsonl"});
  options.holdout = 0.2;
  const PackSummary summary = pack_corpus(options);
  EXPECT_EQ(summary.rule, PackSummary::Holdout::kByHash);
  EXPECT_NEAR(static_cast<double>(summary.heldout.documents), 80, 30);
  EXPECT_EQ(summary.train.documents + summary.heldout.documents, 400u);
  const Texts train = documents_of(*open_train(dir / "out"));
  const Texts heldout = documents_of(*open_heldout(dir / "out"));
  std::string text;
  for (const auto& document : heldout) {
    EXPECT_EQ(std::ranges::count(train, document), 0);  // copies fall on one side
    text += document;
  }
  EXPECT_EQ(read_file(dir / "out/heldout.txt"), text);
  EXPECT_EQ(text.size(), summary.heldout.text_bytes);
  expect_error([&] { TokenDataset(dir / "out"); }, {"expected format godwit-tokens", "godwit-corpus"});
}

TEST(Pack, HoldsOutTailsOfFewDocuments) {
  const ScratchDir dir;
  std::string lines;
  for (int i = 0; i < 100; ++i) lines += fmt::format("line {:03d}\n", i);  // 900 bytes
  put_file(dir / "x.txt", lines + "\f\n" + std::string(40, 'u') + "\u00e9\u00e9\u00e9\u00e9\u00e9");
  auto options = options_for(dir, {"x.txt"});
  options.holdout = 0.1;
  const PackSummary summary = pack_corpus(options);
  EXPECT_EQ(summary.rule, PackSummary::Holdout::kTails);
  // The cut of 90 bytes is at a line start already; that of 5 bytes moves to the next character.
  EXPECT_EQ(documents_of(*open_heldout(dir / "out")), (Texts{lines.substr(810), "\u00e9\u00e9"}));
  EXPECT_EQ(documents_of(*open_train(dir / "out")),
            (Texts{lines.substr(0, 810), std::string(40, 'u') + "\u00e9\u00e9\u00e9"}));
  EXPECT_EQ(read_file(dir / "out/heldout.txt"), lines.substr(810) + "\u00e9\u00e9");
}

TEST(Pack, HoldsOutOneOfFewDocuments) {
  const ScratchDir dir;
  std::string text;
  const auto document = [](int i) { return std::string(50 + 10 * i, static_cast<char>('a' + i)); };
  for (int i = 0; i < 12; ++i) text += document((i * 5) % 12) + "\n\f\n";  // 51 to 161 bytes, 1,272 in all
  put_file(dir / "x.txt", text);
  auto options = options_for(dir, {"x.txt"});
  options.holdout = 0.075;  // 95.4 bytes
  const PackSummary summary = pack_corpus(options);
  EXPECT_EQ(summary.rule, PackSummary::Holdout::kDocument);
  const Texts heldout = documents_of(*open_heldout(dir / "out")),
              train = documents_of(*open_train(dir / "out"));
  ASSERT_EQ(heldout.size(), 1u);
  EXPECT_TRUE(heldout[0].starts_with(document(5))) << heldout[0];
  EXPECT_EQ(train.size(), 11u);
}

TEST(Pack, SameBytesWithAnyNumberOfThreads) {
  const ScratchDir dir;
  std::string text;
  for (int i = 0; i < 9000; ++i)
    text += fmt::format("document {}\n{}\f\n", i, std::string(i % 50, 'x') + "\n");
  put_file(dir / "x.txt", text);
  auto options = options_for(dir, {"x.txt"});
  options.holdout = 0.1;
  options.shard_tokens = 40'000;
  const int before = num_threads();
  for (const int threads : {1, 4}) {
    set_num_threads(threads);
    options.out = dir / fmt::format("out{}", threads);
    pack_corpus(options);
  }
  set_num_threads(before);
  for (const auto& entry : fs::recursive_directory_iterator(dir / "out1")) {
    if (!entry.is_regular_file()) continue;
    const fs::path other = dir / "out4" / entry.path().lexically_relative(dir / "out1");
    EXPECT_EQ(read_file(entry.path()), read_file(other)) << other;
  }
}

TEST(Pack, FailsWithOneClearLineAndLeavesNothing) {
  const ScratchDir dir;
  put_file(dir / "empty.txt", "");
  put_file(dir / "blank.txt", "\f\n\f\n");
  put_file(dir / "bad.jsonl", "{\"text\": \"a\"}\n{\"text\": }\n");
  put_file(dir / "key.jsonl", "{\"txt\": \"a\"}\n");
  put_file(dir / "good.txt", "x");
  const auto expect = [&](const std::vector<std::string>& inputs, std::initializer_list<std::string> parts) {
    expect_error([&] { pack_corpus(options_for(dir, inputs)); }, parts);
    EXPECT_EQ(dir.entries(), 5);
  };
  expect({"empty.txt"}, {"no text in the 1 input files", "empty.txt"});
  expect({"empty.txt", "blank.txt"}, {"no text in the 2 input files"});
  expect({"bad.jsonl"}, {"bad.jsonl:2: not valid JSON"});
  expect({"key.jsonl"}, {"key.jsonl:1: the object has no \"text\""});
  expect({"absent.txt"}, {"no such file or directory", "absent.txt"});
  expect({}, {"no input files"});
  auto options = options_for(dir, {"good.txt"});
  options.holdout = 1;
  expect_error([&] { pack_corpus(options); }, {"0 <= share < 1"});
  options.holdout = 0.5;
  expect_error([&] { pack_corpus(options); }, {"leaves 0 documents to train on"});
  options.holdout = 0;
  options.tokenizer.eos_id = 300;
  expect_error([&] { pack_corpus(options); }, {"end token 300 is not in its vocabulary of 300"});
  options.tokenizer = byte_tokenizer();
  options.tokenizer.encode = [](std::string_view, std::vector<int32_t>& ids) { ids.push_back(300); };
  expect_error([&] { pack_corpus(options); },
               {"token id 300 of document 0 is outside the vocabulary of 300"});
  EXPECT_EQ(dir.entries(), 5);
  options.tokenizer = byte_tokenizer();
  pack_corpus(options);
  expect_error([&] { pack_corpus(options); }, {"out exists already"});
  options.replace = true;
  put_file(dir / "good.txt", "yz");
  pack_corpus(options);
  EXPECT_EQ(documents_of(TokenDataset(dir / "out")), Texts{"yz"});
  fs::create_directory(dir / "mine");
  put_file(dir / "mine/good.txt", "kept");
  options.out = dir / "mine";
  expect_error([&] { pack_corpus(options); }, {"mine: only packed data", "is replaced"});
  EXPECT_TRUE(fs::exists(dir / "mine/good.txt"));
}

TEST(Pack, FullDiskNamesTheFile) {
  const testing::SmallDisk disk(64);
  if (!disk.mounted()) GTEST_SKIP() << "mounting a small file system needs root";
  const ScratchDir dir;
  put_file(dir / "x.txt", std::string(1 << 20, 'x'));
  auto options = options_for(dir, {"x.txt"});
  options.out = disk.path() / "out";
  expect_error([&] { pack_corpus(options); }, {"shard-00000.gwt", "No space left"});
  EXPECT_TRUE(fs::is_empty(disk.path()));
}

}  // namespace
}  // namespace godwit::data
