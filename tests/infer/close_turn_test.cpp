// A turn cut off anywhere and closed is a turn that the parser takes as complete.
#include "godwit/infer/close_turn.h"

#include <gtest/gtest.h>

#include "godwit/text/chat_parser.h"

namespace godwit {
namespace {

const Tokenizer& tokenizer() {
  static const Tokenizer t = Tokenizer::load(GODWIT_FIXTURES "/tokenizer");
  return t;
}

// The sampled part of a turn with thoughts, an answer and two calls.
std::vector<int32_t> whole_turn(bool thinking) {
  ChatMessage user, assistant;
  user.content.emplace_back().text = "What is 6 times 7?";
  assistant.role = ChatRole::kAssistant;
  assistant.reasoning = "They want a product.";
  assistant.content.emplace_back().text = "Let me see.";
  assistant.tool_calls = {{.id = "1", .name = "multiply", .arguments = R"({"a": "six", "b": "seven"})"},
                          {.id = "2", .name = "wait", .arguments = "{}"}};
  ChatOptions options;
  options.thinking = thinking;
  const std::vector<ChatMessage> asked = {user}, answered = {user, assistant};
  const std::vector<int32_t> prompt = encode_chat(render_chat(asked, options), tokenizer()).ids;
  options.generation_prompt = false;
  const std::vector<int32_t> all = encode_chat(render_chat(answered, options), tokenizer()).ids;
  EXPECT_TRUE(std::equal(prompt.begin(), prompt.end(), all.begin()));
  return {all.begin() + static_cast<int64_t>(prompt.size()), all.end()};
}

TEST(CloseTurn, AnyCutOfATurnBecomesComplete) {
  const int32_t open = tokenizer().special_id(kOpen), close = tokenizer().special_id(kClose),
                sep = tokenizer().special_id(kSep);
  for (const bool thinking : {true, false}) {
    const std::vector<int32_t> turn = whole_turn(thinking);
    // Up to the response's end and beyond, but not into the message's own closing tag.
    bool in_header = false;
    const size_t end =
        turn.size() - encode_chat(close_turn(tokenizer(), turn, thinking), tokenizer()).ids.size();
    for (size_t cut = 0; cut <= end; ++cut) {
      std::vector<int32_t> ids(turn.begin(), turn.begin() + static_cast<int64_t>(cut));
      if (cut > 0) {
        const int32_t last = ids.back();
        in_header = last == open || last == close || (in_header && last != sep);
      }
      const std::vector<int32_t> rest = encode_chat(close_turn(tokenizer(), ids, thinking), tokenizer()).ids;
      ids.insert(ids.end(), rest.begin(), rest.end());
      const ParsedTurn parsed = parse_turn(tokenizer(), ids, thinking);
      EXPECT_TRUE(parsed.complete) << "cut after " << cut << " of " << turn.size();
      EXPECT_TRUE(in_header || parsed.faults.empty()) << "cut after " << cut << ": " << parsed.faults[0];
    }
  }
}

TEST(CloseTurn, WholeTurnNeedsOnlyTheMessagesEnd) {
  std::vector<int32_t> turn = whole_turn(true);
  std::vector<int32_t> closing = {tokenizer().special_id(kClose)};
  tokenizer().encode_append("message", closing);
  closing.insert(closing.end(), {tokenizer().special_id(kSep), tokenizer().special_id(kEndOfMsg)});
  ASSERT_TRUE(std::equal(closing.rbegin(), closing.rend(), turn.rbegin()));
  turn.resize(turn.size() - closing.size());
  EXPECT_EQ(encode_chat(close_turn(tokenizer(), turn, true), tokenizer()).ids, closing);
}

}  // namespace
}  // namespace godwit
