// Conversations: what the loss sees of them, from the JSON line to the targets of a batch.
#include <gtest/gtest.h>

#include <algorithm>

#include "godwit/data/dataset.h"
#include "godwit/data/eval_reader.h"
#include "godwit/data/pack.h"
#include "godwit/data/packed_batch.h"
#include "godwit/data/tokenizer.h"
#include "tests/support/files.h"

namespace godwit::data {
namespace {

using testing::expect_error;
using testing::put_file;
using testing::ScratchDir;

Tokenizer bytes() {
  std::vector<std::string> ranks;
  for (int b = 0; b < 256; ++b) ranks.emplace_back(1, static_cast<char>(b));
  return Tokenizer::from_ranks(std::move(ranks));
}

constexpr const char* kTwoTurns =
    R"({"messages": [{"role": "user", "content": "question"}, {"role": "assistant", "content": "first"},)"
    R"( {"role": "user", "content": "and now?"}, {"role": "assistant", "content": "second"}], "thinking": false})";

// The targets of a document as text; special tokens as '|'.
std::string trained_text(const TokenDataset& dataset, uint64_t document) {
  PackedBatch batch;
  batch.append(dataset, 0, {document, 0, dataset.document_tokens(document)});
  std::string text;
  for (const int64_t target : batch.targets) {
    if (target != kNoTarget) text += target < 256 ? static_cast<char>(target) : '|';
  }
  return text;
}

PackSummary pack(const ScratchDir& dir, const std::string& lines, const Tokenizer& tokenizer,
                 double holdout = 0) {
  put_file(dir / "chat.jsonl", lines);
  PackOptions options;
  options.inputs = {dir / "chat.jsonl"};
  options.out = dir / "out";
  options.replace = true;
  options.holdout = holdout;
  options.tokenizer = pack_tokenizer(tokenizer);
  return pack_corpus(options);
}

TEST(ChatPack, TheLossSeesTheAssistantAlone) {
  const ScratchDir dir;
  const Tokenizer tokenizer = bytes();
  const PackSummary summary = pack(dir, std::string(kTwoTurns) + "\n{\"text\": \"plain\"}\n", tokenizer);
  const TokenDataset dataset(dir / "out");
  ASSERT_EQ(dataset.documents(), 2u);
  const std::string trained = trained_text(dataset, 0);
  EXPECT_NE(trained.find("first"), std::string::npos);
  EXPECT_NE(trained.find("second"), std::string::npos);
  EXPECT_EQ(trained.find("question"), std::string::npos);
  EXPECT_EQ(trained.find("now"), std::string::npos);
  EXPECT_EQ(trained_text(dataset, 1), "lain|") << "all of a text is trained, its [EOS] too";
  // The same as the chat format says, token by token.
  const ChatSample sample = chat_sample(tokenizer, kTwoTurns, "here");
  std::vector<uint8_t> marks(dataset.document_tokens(0));
  dataset.copy_trained(0, 0, marks);
  ASSERT_EQ(marks.size(), sample.trained.size() + 1);
  EXPECT_TRUE(std::equal(sample.trained.begin(), sample.trained.end(), marks.begin()));
  EXPECT_EQ(marks.back(), 0);
  EXPECT_EQ(dataset.document_targets(0), trained.size());
  EXPECT_EQ(summary.train.text_bytes, sample.trained_text.size() + 5);
}

TEST(ChatPack, AnyWindowOfADocumentHasTheSameTargets) {
  const ScratchDir dir;
  const Tokenizer tokenizer = bytes();
  pack(dir, std::string(kTwoTurns) + "\n{\"text\": \"plain\"}\n" + kTwoTurns + "\n", tokenizer);
  const auto dataset = std::make_shared<const TokenDataset>(dir / "out");
  for (uint64_t document = 0; document < 3; ++document) {
    const uint64_t tokens = dataset->document_tokens(document);
    PackedBatch whole;
    whole.append(*dataset, 0, {document, 0, tokens});
    for (uint64_t cut = 1; cut < tokens; ++cut) {
      PackedBatch parts;
      parts.append(*dataset, 0, {document, 0, cut});
      parts.append(*dataset, 0, {document, cut, tokens - cut});
      ASSERT_EQ(parts.targets, whole.targets) << "cut at " << cut;
    }
  }
  const EvalReader reader(dataset, 16);
  uint64_t targets = 0;
  for (int64_t i = 0; i < reader.batches(); ++i) {
    const PackedBatch batch = reader.batch(i);
    targets +=
        static_cast<uint64_t>(std::ranges::count_if(batch.targets, [](int64_t t) { return t != kNoTarget; }));
  }
  EXPECT_EQ(targets, reader.targets());
}

TEST(ChatPack, MarksSurviveTheFileAtEveryBit) {
  const ScratchDir dir;
  for (uint64_t tokens = 0; tokens < 70; ++tokens) {
    ShardWriter writer(dir / "s.gwt", 300);
    std::vector<int32_t> ids(tokens, 5);
    std::vector<uint8_t> marks(tokens), back(tokens);
    for (uint64_t i = 0; i < tokens; ++i) marks[i] = (i * 7 + tokens) % 3 == 0;
    writer.add_document(ids, 1);  // all of it
    writer.add_document(ids, 1, marks);
    writer.add_document(ids, 1);
    writer.finish();
    const TokenShard shard(dir / "s.gwt");
    shard.verify();
    EXPECT_EQ(shard.masked(), std::ranges::count(marks, 0) > 0);
    shard.copy_trained(1, 0, back);
    EXPECT_EQ(back, marks);
    for (const uint64_t whole : {0, 2}) {
      shard.copy_trained(whole, 0, back);
      EXPECT_EQ(std::ranges::count(back, 0), 0);
    }
    fs::remove(dir / "s.gwt");
  }
}

TEST(ChatPack, HeldOutConversationsStayWhole) {
  const ScratchDir dir;
  const Tokenizer tokenizer = bytes();
  std::string lines;
  for (int i = 0; i < 100; ++i)
    lines += R"({"messages": [{"role": "user", "content": ")" + std::to_string(i) +
             R"("}, {"role": "assistant", "content": "a"}]})" + "\n";
  const PackSummary summary = pack(dir, lines, tokenizer, 0.1);
  EXPECT_EQ(summary.rule, PackSummary::Holdout::kByHash);
  EXPECT_EQ(summary.train.documents + summary.heldout.documents, 100u);
  EXPECT_GT(summary.heldout.documents, 0u);
  expect_error([&] { pack(dir, std::string(kTwoTurns) + "\n", tokenizer, 1e-9); },
               {"1 conversations chooses none"});
}

TEST(ChatPack, BadConversationsNameTheLine) {
  const ScratchDir dir;
  const Tokenizer tokenizer = bytes();
  const std::string good = std::string(kTwoTurns) + "\n";
  expect_error([&] { pack(dir, good + R"({"messages": [{"role": "judge", "content": "x"}]})", tokenizer); },
               {"chat.jsonl:2", "judge"});
  expect_error([&] { pack(dir, good + R"({"messages": [{"role": "user", "content": "x"}]})", tokenizer); },
               {"chat.jsonl:2", "no assistant message to train on"});
  expect_error([&] { pack(dir, R"({"messages": 7})", tokenizer); }, {"chat.jsonl:1"});
  PackOptions options;
  options.inputs = {dir / "chat.jsonl"};
  put_file(dir / "chat.jsonl", good);
  options.out = dir / "other";
  options.tokenizer = pack_tokenizer(tokenizer);
  options.tokenizer.encode_chat = nullptr;
  expect_error([&] { pack_corpus(options); }, {"chat.jsonl:1", "no chat format"});
}

}  // namespace
}  // namespace godwit::data
