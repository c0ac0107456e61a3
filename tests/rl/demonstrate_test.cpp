#include "godwit/rl/demonstrate.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "godwit/data/pack.h"
#include "godwit/data/tokenizer.h"
#include "tests/support/files.h"

namespace godwit::rl {
namespace {

using nlohmann::json;
using testing::expect_error;
using testing::put_file;
using testing::ScratchDir;

class Demonstrated : public ::testing::TestWithParam<const char*> {};

// What the expert does is packed as its own words, and everything the environment says is not.
TEST_P(Demonstrated, IsPackedWithTheLossOnTheExpertAlone) {
  const auto environment = make_environment(GetParam(), json::object());
  std::vector<std::string> ranks;
  for (int b = 0; b < 256; ++b) ranks.emplace_back(1, static_cast<char>(b));
  const Tokenizer tokenizer = Tokenizer::from_ranks(std::move(ranks));
  for (uint64_t seed = 0; seed < 5; ++seed) {
    const Demonstration episode = demonstrate(*environment, seed);
    EXPECT_EQ(episode.success, 1);
    const data::ChatSample sample = data::chat_sample(tokenizer, to_json(episode).dump(), "here");
    ASSERT_EQ(sample.ids.size(), sample.trained.size());
    for (const ChatMessage& message : episode.messages) {
      for (const ChatPart& part : message.content) {
        if (message.role == ChatRole::kAssistant) {
          EXPECT_NE(sample.trained_text.find(part.text), std::string::npos) << part.text;
        } else if (part.text.size() > 20) {  // longer than a number that the expert may repeat
          EXPECT_EQ(sample.trained_text.find(part.text), std::string::npos) << part.text;
        }
      }
      for (const ChatToolCall& call : message.tool_calls)
        EXPECT_NE(sample.trained_text.find("\"" + call.name + "\""), std::string::npos) << call.name;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Environments, Demonstrated, ::testing::Values("calculator", "grid", "notes"));

TEST(Demonstrate, AnExpertThatGivesUpShowsBothOutcomes) {
  const auto environment = make_environment("calculator", {{"give_up", 0.5}, {"failure", 0.5}});
  double solved = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) solved += demonstrate(*environment, seed).success;
  EXPECT_GT(solved, 20);
  EXPECT_LT(solved, 90);
}

class Silent final : public Environment {
 public:
  Task reset(uint64_t) override { return {}; }
  StepResult step(const ChatMessage&) override { return {}; }
  std::string save() const override { return {}; }
  void load(std::string_view) override {}
  uint64_t state_hash() const override { return 0; }
};

TEST(Demonstrate, WithoutAnExpertItSaysSo) {
  Silent silent;
  expect_error([&] { demonstrate(silent, 1); }, {"no scripted expert"});
}

// A tokenizer learns from the words of a conversation, never across special tokens.
TEST(Demonstrate, PlainTextHasNoSpecialTokens) {
  const ScratchDir dir;
  const auto environment = make_environment("calculator", json::object());
  put_file(dir / "demos.jsonl",
           to_json(demonstrate(*environment, 3)).dump() + "\n{\"text\": \"a <|sep|> b\"}\n");
  std::vector<std::string> texts;
  data::read_documents(dir / "demos.jsonl", [&](const data::Document& document, uint64_t) {
    texts.push_back(data::plain_text(document));
  });
  ASSERT_EQ(texts.size(), 2u);
  EXPECT_EQ(texts[0].find("<|"), std::string::npos);
  EXPECT_NE(texts[0].find("call tool=\"calc\" index=\"1\""), std::string::npos) << texts[0];
  EXPECT_EQ(texts[1], "a <|sep|> b") << "a text's own characters stay";
}

}  // namespace
}  // namespace godwit::rl
