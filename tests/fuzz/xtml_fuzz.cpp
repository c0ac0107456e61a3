// text/chat_parser: any ids as an assistant's turn. Two bytes make an id, so that specials are common.
// However the ids come, the events are valid UTF-8, each call's arguments are one JSON object, no markup is
// text, and a turn read at once is the sum of the events.
#include <nlohmann/json.hpp>
#include <set>

#include "godwit/text/chat_parser.h"
#include "godwit/text/utf8.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/vocabulary.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace godwit;
  if (size == 0) return 0;
  const Tokenizer& tokenizer = fuzz::vocabulary();
  static const int32_t kStructure[] = {tokenizer.special_id(kOpen), tokenizer.special_id(kClose),
                                       tokenizer.special_id(kSep), tokenizer.special_id(kEndOfMsg)};
  const bool thinking = data[0] & 1;
  std::vector<int32_t> ids;
  for (size_t i = 1; i < size; ++i) {
    // Bytes are themselves; 0xf5 to 0xff, which are in no UTF-8, stand for specials and longer tokens.
    if (data[i] < 0xf5 || i + 1 == size) {
      ids.push_back(data[i]);
    } else if (data[i] < 0xfd) {
      ids.push_back(kStructure[data[i] % 4]);
    } else {
      ids.push_back((data[i] - 0xfd) * 256 + data[i + 1]);
      ++i;
    }
    ids.back() = std::min(ids.back(), tokenizer.vocab_size() - 1);
  }
  ChatParser parser(tokenizer, thinking);
  std::vector<ChatEvent> events;
  ChatMessage message;
  message.role = ChatRole::kAssistant;
  std::set<size_t> open, ended;
  const auto take = [&] {
    for (const ChatEvent& event : events) {
      fuzz::require(valid_utf8_prefix(event.text) == event.text.size());
      if (event.kind == ChatEvent::Kind::kCallBegin) {
        fuzz::require(event.call == message.tool_calls.size());
        open.insert(event.call);
      } else if (event.kind == ChatEvent::Kind::kCallArguments || event.kind == ChatEvent::Kind::kCallEnd) {
        fuzz::require(open.contains(event.call));
        if (event.kind == ChatEvent::Kind::kCallEnd) {
          open.erase(event.call);
          ended.insert(event.call);
        }
      }
      add_event(event, message);
    }
    events.clear();
  };
  for (const int32_t id : ids) {
    parser.push(id, events);
    take();
  }
  parser.finish(events);
  take();
  fuzz::require(open.empty() && ended.size() == message.tool_calls.size());
  for (const ChatToolCall& call : message.tool_calls)
    fuzz::require(nlohmann::json::parse(call.arguments).is_object());
  const ParsedTurn whole = parse_turn(tokenizer, ids, thinking);
  fuzz::require(whole.message.reasoning == message.reasoning);
  fuzz::require(whole.message.content.size() == message.content.size());
  for (size_t i = 0; i < message.content.size(); ++i)
    fuzz::require(whole.message.content[i].text == message.content[i].text);
  fuzz::require(whole.message.tool_calls.size() == message.tool_calls.size());
  for (size_t i = 0; i < message.tool_calls.size(); ++i)
    fuzz::require(whole.message.tool_calls[i].arguments == message.tool_calls[i].arguments);
  return 0;
}
