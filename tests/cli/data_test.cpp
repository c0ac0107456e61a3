// data pack, and eval on what it wrote.
#include <gtest/gtest.h>

#include <cmath>

#include "godwit/base/file.h"
#include "tests/cli/program.h"
#include "tests/cli/tiny_directory.h"

namespace godwit {
namespace {

using nlohmann::json;
using test::Outcome;
using test::run;
using test::tiny_directory;

// Twenty documents of a few hundred tokens each.
std::string corpus() {
  std::string text;
  for (int document = 0; document < 20; ++document) {
    if (document > 0) text += "\f\n";
    for (int line = 0; line < 30; ++line)
      text += fmt::format("Document {} has a line {}, and the godwit flew on.\n", document, line * document);
  }
  return text;
}

TEST(DataPack, ThenInspectThenLoss) {
  const testing::ScratchDir dir;
  testing::put_file(dir / "text.txt", corpus());
  const std::string out = dir / "data";
  const Outcome packed = run(
      {"data", "pack", dir / "text.txt", "--out", out, "--tokenizer", tiny_directory(), "--holdout", "0.2"});
  ASSERT_EQ(packed.code, 0) << packed.err;
  EXPECT_NE(packed.out.find("held out"), std::string::npos);

  const json found = run({"inspect", out, "--json"}).json();
  EXPECT_EQ(found["kind"], "data");
  EXPECT_EQ(found["train"]["vocab_size"], test::directory_config().vocab_size);
  const auto bytes =
      found["train"]["text_bytes"].get<int64_t>() + found["heldout"]["text_bytes"].get<int64_t>();
  EXPECT_EQ(bytes, static_cast<int64_t>(corpus().size() - 19 * 2));

  const Outcome again =
      run({"data", "pack", dir / "text.txt", "--out", out, "--tokenizer", tiny_directory()});
  EXPECT_EQ(again.code, 1);
  EXPECT_NE(again.err.find(out), std::string::npos) << again.err;

  const Outcome o =
      run({"eval", "ppl", "--model", tiny_directory(), "--data", out, "--context", "100", "--json"});
  ASSERT_EQ(o.code, 0) << o.err;
  const json loss = o.json();
  // A model that has learnt nothing gives every token about the same probability.
  EXPECT_NEAR(loss["nats_per_token"].get<double>(), std::log(test::directory_config().vocab_size), 1.0);
  EXPECT_EQ(loss["tokens"].get<int64_t>() + loss["documents"].get<int64_t>(),
            found["heldout"]["tokens"].get<int64_t>());
  EXPECT_NEAR(loss["bits_per_byte"].get<double>() * loss["bytes"].get<double>(),
              loss["nats_per_token"].get<double>() / std::log(2.0) * loss["tokens"].get<double>(), 1e-6);
  EXPECT_GT(loss["zstd19_bits_per_byte"].get<double>(), 0.0);
  int64_t tokens = 0;
  for (const json& bucket : loss["by_position"]) tokens += bucket["tokens"].get<int64_t>();
  EXPECT_EQ(tokens, loss["tokens"].get<int64_t>());

  // The held-out text as a file of one document: the same bytes, but for the documents' ends.
  const Outcome raw =
      run({"eval", "ppl", "--model", tiny_directory(), "--data", out + "/heldout.txt", "--max-tokens", "50"});
  ASSERT_EQ(raw.code, 0) << raw.err;
  EXPECT_NE(raw.out.find("50 tokens"), std::string::npos) << raw.out;
}

TEST(DataPack, OfAnotherTokenizerIsRefused) {
  const testing::ScratchDir dir;
  testing::put_file(dir / "text.txt", corpus());
  const std::string out = dir / "bytes";
  ASSERT_EQ(run({"data", "pack", dir / "text.txt", "--out", out}).code, 0);
  const Outcome o = run({"eval", "ppl", "--model", tiny_directory(), "--data", out});
  EXPECT_EQ(o.code, 1);
  EXPECT_NE(o.err.find("another tokenizer"), std::string::npos) << o.err;
}

TEST(TokenizerTrain, KeepsATokenizerThatIsThere) {
  const testing::ScratchDir dir;
  testing::put_file(dir / "text.txt", corpus());
  const std::vector<std::string> train = {"tokenizer",    "train", dir / "text.txt", "--out", dir / "tokens",
                                          "--vocab-size", "300"};
  ASSERT_EQ(run(train).code, 0);
  const std::string before = read_file(dir / "tokens/tiktoken.model");
  testing::put_file(dir / "text.txt", corpus() + "more text, another vocabulary");
  const Outcome again = run(train);
  EXPECT_EQ(again.code, 1);
  EXPECT_NE(again.err.find("holds a tokenizer already"), std::string::npos) << again.err;
  EXPECT_EQ(read_file(dir / "tokens/tiktoken.model"), before);
}

TEST(Eval, MqarAndNiah) {
  const Outcome mqar =
      run({"eval", "mqar", "--model", tiny_directory(), "--context", "64", "--samples", "4", "--json"});
  ASSERT_EQ(mqar.code, 0) << mqar.err;
  const json pairs = mqar.json()["points"];
  ASSERT_EQ(pairs.size(), 3u);
  for (const json& p : pairs) {
    EXPECT_EQ(p["queries"], p["pairs"].get<int64_t>() * 4);
    EXPECT_DOUBLE_EQ(p["chance"].get<double>(), 1.0 / p["pairs"].get<double>());
    EXPECT_LE(p["accuracy"].get<double>(), 0.5);
  }
  const Outcome niah = run({"eval", "niah", "--model", tiny_directory(), "--context", "256", "--samples", "2",
                            "--distractors", "1", "--json"});
  ASSERT_EQ(niah.code, 0) << niah.err;
  ASSERT_EQ(niah.json()["points"].size(), 5u);
  for (const json& p : niah.json()["points"]) EXPECT_EQ(p["accuracy"], 0.0);
}

TEST(Chat, AnswersFromStdin) {
  const Outcome o = run({"chat", "--model", tiny_directory(), "--max-tokens", "6", "--seed", "1"},
                        "Hello there.\n\nAnd again.\n");
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.err.find("has not learnt the chat format"), std::string::npos) << o.err;
  EXPECT_EQ(o.err_lines(), 1) << o.err;
  EXPECT_GE(std::count(o.out.begin(), o.out.end(), '\n'), 2) << o.out;
}

}  // namespace
}  // namespace godwit
