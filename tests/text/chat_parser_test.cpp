#include "godwit/text/chat_parser.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "godwit/base/check.h"
#include "godwit/text/chat_json.h"
#include "tests/text/tokenizer_fixture.h"

namespace godwit {
namespace {

using Json = nlohmann::ordered_json;
using Kind = ChatEvent::Kind;
using Ids = std::vector<int32_t>;

const Json& golden() {
  static const Json cases = Json::parse(read_file(GODWIT_FIXTURES "/chat/parse.json"))["cases"];
  return cases;
}

// Strings with specials, {"plain": ...} without.
Ids ids_of(const Json& turn) {
  Ids ids;
  for (const Json& part : turn) {
    const Ids some = part.is_string() ? fixture_tokenizer().encode_with_specials(part.get<std::string>())
                                      : fixture_tokenizer().encode(part["plain"].get<std::string>());
    ids.insert(ids.end(), some.begin(), some.end());
  }
  return ids;
}

std::string text_of(const ChatMessage& message) {
  return message.content.empty() ? "" : message.content[0].text;
}

TEST(ChatParser, ReadsTheGoldenTurns) {
  for (const Json& c : golden()) {
    const ParsedTurn turn = parse_turn(fixture_tokenizer(), ids_of(c["turn"]), c["thinking"]);
    EXPECT_EQ(turn.message.reasoning, c["reasoning"].get<std::string>()) << c["name"];
    EXPECT_EQ(text_of(turn.message), c["content"].get<std::string>()) << c["name"];
    Json calls = Json::array();
    for (const ChatToolCall& call : turn.message.tool_calls) calls.push_back({call.name, call.arguments});
    EXPECT_EQ(calls, c["calls"]) << c["name"];
    EXPECT_EQ(turn.complete, c["complete"].get<bool>()) << c["name"];
    EXPECT_EQ(turn.faults.size(), c["faults"].get<size_t>())
        << c["name"] << ": " << ::testing::PrintToString(turn.faults);
  }
}

// The rules that hold for any ids at all: a stream is well-formed, whole, and free of markup.
void check_stream(const Ids& ids, bool thinking) {
  ChatParser parser(fixture_tokenizer(), thinking);
  std::vector<ChatEvent> events;
  ChatMessage sum;
  bool in_call = false;
  size_t begun = 0;
  const auto take = [&] {
    for (const ChatEvent& event : events) {
      ASSERT_EQ(valid_utf8_prefix(event.text), event.text.size());
      if (event.kind == Kind::kCallBegin) {
        ASSERT_FALSE(in_call);
        ASSERT_EQ(event.call, begun++);
        in_call = true;
      } else if (event.kind == Kind::kCallEnd) {
        ASSERT_TRUE(in_call);
        in_call = false;
      } else {
        ASSERT_EQ(in_call, event.kind == Kind::kCallArguments);
        ASSERT_FALSE(event.text.empty());
      }
      add_event(event, sum);
    }
    events.clear();
  };
  for (const int32_t id : ids) {
    parser.push(id, events);
    take();
  }
  parser.finish(events);
  take();
  ASSERT_FALSE(in_call);
  for (const ChatToolCall& call : sum.tool_calls)
    ASSERT_TRUE(Json::parse(call.arguments).is_object()) << call.arguments;
  const ParsedTurn whole = parse_turn(fixture_tokenizer(), ids, thinking);
  EXPECT_EQ(whole.message.reasoning, sum.reasoning);
  EXPECT_EQ(text_of(whole.message), text_of(sum));
  EXPECT_EQ(whole.faults, parser.faults());
}

TEST(ChatParser, StreamsWhatItReadsAtOnce) {
  for (const Json& c : golden()) check_stream(ids_of(c["turn"]), c["thinking"]);
}

TEST(ChatParser, EveryCutOfATurnGivesCompleteJson) {
  for (const Json& c : golden()) {
    Ids ids = ids_of(c["turn"]);
    for (; !ids.empty(); ids.pop_back()) check_stream(ids, c["thinking"]);
  }
}

TEST(ChatParser, SurvivesAnyMixOfTags) {
  const char* words[] = {"think",
                         "response",
                         "tools",
                         "call",
                         "argument",
                         "json",
                         "message",
                         " tool=\"t\"",
                         " key=\"k\"",
                         " type=\"string\"",
                         " type=\"number\"",
                         "{\"a\": 1}",
                         "7",
                         "text",
                         "\n",
                         "é"};
  const std::string_view specials[] = {kOpen, kOpen, kOpen, kClose, kClose,
                                       kSep,  kSep,  kSep,  kEos,   kEndOfMsg};
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    Ids ids;
    for (uint64_t i = 0; i < 40; ++i) {
      const uint64_t bits = random_bits(seed, 0, i);
      if (bits % 2 == 0) {
        // The end of the message must be rare, or no turn would be long.
        const size_t choice = (bits >> 8) % std::size(specials);
        ids.push_back(
            fixture_tokenizer().special_id(choice == 9 && (bits >> 16) % 8 != 0 ? kSep : specials[choice]));
      } else {
        fixture_tokenizer().encode_append(words[(bits >> 8) % std::size(words)], ids);
      }
    }
    check_stream(ids, seed % 2 == 0);
  }
}

TEST(ChatParser, StreamsTextArgumentsAsTheyCome) {
  ChatParser parser(fixture_tokenizer(), /*thinking=*/false);
  std::vector<ChatEvent> events;
  const auto push = [&](const char* text) {
    events.clear();
    for (const int32_t id : fixture_tokenizer().encode_with_specials(text)) parser.push(id, events);
  };
  push("<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool=\"write\" index=\"1\"<|sep|>");
  EXPECT_EQ(events, (std::vector<ChatEvent>{{Kind::kCallBegin, 0, "write"}}));
  push("<|open|>argument key=\"text\" type=\"string\"<|sep|>");
  EXPECT_EQ(events, (std::vector<ChatEvent>{{Kind::kCallArguments, 0, "{\"text\": \""}}));
  push("a");
  EXPECT_EQ(events, (std::vector<ChatEvent>{{Kind::kCallArguments, 0, "a"}}));
  push("\"\n");
  std::string text;
  for (const ChatEvent& event : events) text += event.text;
  EXPECT_EQ(text, "\\\"\\n");
  push("<|close|>argument<|sep|><|close|>call<|sep|>");
  EXPECT_EQ(events,
            (std::vector<ChatEvent>{
                {Kind::kCallArguments, 0, "\""}, {Kind::kCallArguments, 0, "}"}, {Kind::kCallEnd, 0, ""}}));
}

// What render_chat writes for an assistant, the parser reads back, with any text in it.
TEST(ChatParser, ReadsWhatTheFormatWrites) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const auto word = [&](const char* prefix, uint64_t stream) {
      return std::string(prefix) + pool_text(40 + seed, stream, random_bits(seed, stream, 0) % 12);
    };
    ChatMessage message{.role = ChatRole::kAssistant, .reasoning = word("r", 1)};
    message.content.emplace_back().text = word("c", 2) + "<|close|>response<|sep|>";
    for (uint64_t call = 0; call < random_bits(seed, 3, 0) % 4; ++call) {
      const Json arguments = {{word("s", 4), word("", 5)},
                              {"n", 1.5},
                              {"o", {{word("", 6), {1, word("", 7), nullptr}}}},
                              {"b", true}};
      message.tool_calls.push_back({.name = word("t", 8), .arguments = json_python_style(arguments)});
    }
    const bool thinking = seed % 2 == 0;
    if (!thinking) message.reasoning.clear();
    const auto prompt = encode_chat(render_chat({}, {.thinking = thinking}), fixture_tokenizer()).ids;
    const auto whole =
        encode_chat(render_chat({&message, 1}, {.thinking = thinking, .generation_prompt = false}),
                    fixture_tokenizer())
            .ids;
    ASSERT_TRUE(std::equal(prompt.begin(), prompt.end(), whole.begin()));
    const ParsedTurn turn =
        parse_turn(fixture_tokenizer(), std::span(whole).subspan(prompt.size()), thinking);
    EXPECT_EQ(message_to_json(turn.message), message_to_json(message));
    EXPECT_TRUE(turn.complete);
    EXPECT_TRUE(turn.faults.empty()) << ::testing::PrintToString(turn.faults);
  }
}

TEST(ChatParser, BytesThatAreNoTextBecomeReplacementCharacters) {
  const Ids ids = {0xe4, 0xb8, fixture_tokenizer().special_id(kClose), 't', 'h', 'i',
                   'n',  'k',  fixture_tokenizer().special_id(kSep)};
  EXPECT_EQ(parse_turn(fixture_tokenizer(), ids, /*thinking=*/true).message.reasoning, "\uFFFD");
  EXPECT_THROW(parse_turn(fixture_tokenizer(), Ids{9999}, /*thinking=*/true), Error);
}

}  // namespace
}  // namespace godwit
