#include "godwit/text/chat_parser.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "godwit/base/check.h"

namespace godwit {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kBlanks = " \t\r\n";

std::string_view trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlanks) - begin + 1);
}

// The inside of a JSON string, without the quotes.
std::string json_escaped(std::string_view text) {
  const std::string quoted = Json(std::string(text)).dump();
  return quoted.substr(1, quoted.size() - 2);
}

std::string unescape_attribute(std::string_view value) {
  std::string out;
  while (!value.empty()) {
    if (value.starts_with("&quot;")) {
      out += '"';
      value.remove_prefix(6);
    } else if (value.starts_with("&amp;")) {
      out += '&';
      value.remove_prefix(5);
    } else {
      out += value[0];
      value.remove_prefix(1);
    }
  }
  return out;
}

bool has_type(const Json& value, std::string_view type) {
  if (type == "number") return value.is_number();
  if (type == "boolean") return value.is_boolean();
  if (type == "null") return value.is_null();
  if (type == "object") return value.is_object();
  return type == "array" && value.is_array();
}

}  // namespace

ChatParser::ChatParser(const Tokenizer& tokenizer, bool thinking)
    : tokenizer_(&tokenizer),
      decoder_(tokenizer),
      open_id_(tokenizer.special_id(kOpen)),
      close_id_(tokenizer.special_id(kClose)),
      sep_id_(tokenizer.special_id(kSep)),
      end_id_(tokenizer.special_id(kEndOfMsg)) {
  stack_.push_back(thinking ? Tag::kThink : Tag::kResponse);
}

ChatParser::Tag ChatParser::tag_of(std::string_view name) {
  for (const Tag tag :
       {Tag::kMessage, Tag::kThink, Tag::kResponse, Tag::kTools, Tag::kCall, Tag::kArgument, Tag::kJson}) {
    if (name == name_of(tag)) return tag;
  }
  return Tag::kUnknown;
}

std::string_view ChatParser::name_of(Tag tag) {
  constexpr std::string_view kNames[] = {"message", "think",    "response", "tools",
                                         "call",    "argument", "json",     "unknown"};
  return kNames[static_cast<size_t>(tag)];
}

bool ChatParser::is_open(Tag tag) const {
  return std::find(stack_.begin(), stack_.end(), tag) != stack_.end();
}

void ChatParser::push(int32_t id, std::vector<ChatEvent>& events) {
  if (done_) return;
  if (tokenizer_->is_special(id)) {
    text(decoder_.finish(), events);
    structure(id, events);
  } else {
    text(decoder_.push(id), events);
  }
}

void ChatParser::finish(std::vector<ChatEvent>& events) {
  if (done_) return;
  text(decoder_.finish(), events);
  if (in_header_ != Header::kNone) fault("the turn ends inside a tag");
  in_header_ = Header::kNone;
  close_down_to(Tag::kMessage, "the end of the turn", events);
}

void ChatParser::structure(int32_t id, std::vector<ChatEvent>& events) {
  if (id == sep_id_) {
    if (in_header_ == Header::kNone) return fault("<|sep|> outside a tag");
    end_header(events);
  } else if (id == open_id_ || id == close_id_) {
    if (in_header_ != Header::kNone) fault(fmt::format("a tag inside the tag '{}'", header_));
    in_header_ = id == open_id_ ? Header::kOpen : Header::kClose;
    header_.clear();
  } else if (id == end_id_) {
    if (in_header_ != Header::kNone) fault("the turn ends inside a tag");
    in_header_ = Header::kNone;
    if (!stack_.empty()) fault("<|end_of_msg|> before the message is closed");
    close_down_to(Tag::kMessage, "<|end_of_msg|>", events);
    done_ = true;
  } else {
    fault(fmt::format("special token {} in a turn", tokenizer_->token_bytes(id)));
  }
}

void ChatParser::text(std::string_view text, std::vector<ChatEvent>& events) {
  if (text.empty()) return;
  if (in_header_ != Header::kNone) {
    header_ += text;
    return;
  }
  switch (stack_.empty() ? Tag::kUnknown : stack_.back()) {
    case Tag::kThink:
      events.push_back({ChatEvent::Kind::kReasoning, 0, std::string(text)});
      break;
    case Tag::kResponse:
      events.push_back({ChatEvent::Kind::kContent, 0, std::string(text)});
      break;
    case Tag::kMessage:
      between(text, events);
      break;
    case Tag::kArgument:
      if (type_ == "string") {
        arguments(json_escaped(text), events);
        break;
      }
      [[fallthrough]];
    case Tag::kJson:
      waiting_ += text;
      break;
    case Tag::kTools:
    case Tag::kCall:
    case Tag::kUnknown:
      if (!trimmed(text).empty()) fault("text where there must be none");
      break;
  }
}

// White space between channels is layout as long as nothing else follows it.
void ChatParser::between(std::string_view text, std::vector<ChatEvent>& events) {
  waiting_ += text;
  if (trimmed(waiting_).empty()) return;
  fault("text outside the channels");
  waiting_.clear();
  stack_.push_back(Tag::kResponse);
  events.push_back({ChatEvent::Kind::kContent, 0, std::string(text.substr(text.find_first_not_of(kBlanks)))});
}

// header_ is a name, and for an opening tag attributes: name( key="value")*
void ChatParser::end_header(std::vector<ChatEvent>& events) {
  const bool opens = std::exchange(in_header_, Header::kNone) == Header::kOpen;
  const std::string header = std::exchange(header_, {});
  std::string_view rest = trimmed(header);
  const std::string_view name = rest.substr(0, rest.find_first_of(kBlanks));
  rest = trimmed(rest.substr(name.size()));
  std::vector<Attribute> attributes;
  while (!rest.empty()) {
    const size_t equals = rest.find("=\"");
    const size_t end = equals == std::string_view::npos ? equals : rest.find('"', equals + 2);
    if (end == std::string_view::npos) {
      fault(fmt::format("malformed attributes in the tag '{}'", header));
      break;
    }
    attributes.push_back({std::string(trimmed(rest.substr(0, equals))),
                          unescape_attribute(rest.substr(equals + 2, end - equals - 2))});
    rest = trimmed(rest.substr(end + 1));
  }
  const Tag tag = tag_of(name);
  if (opens) return open(tag, name, attributes, events);
  if (tag == Tag::kUnknown ? stack_.empty() || stack_.back() != tag : !is_open(tag)) {
    return fault(fmt::format("'{}' is closed but not open", name));
  }
  close_down_to(tag, fmt::format("the end of '{}'", name), events);
  close_top(events);
}

// Where a tag may stand decides what is closed before it.
void ChatParser::open(Tag tag, std::string_view name, const std::vector<Attribute>& attributes,
                      std::vector<ChatEvent>& events) {
  if (stack_.empty()) return fault(fmt::format("'{}' after the end of the message", name));
  const auto below = [&](Tag parent) { close_down_to(parent, fmt::format("'{}'", name), events); };
  switch (tag) {
    case Tag::kMessage:
      return fault("a message inside a message");
    case Tag::kThink:
    case Tag::kResponse:
    case Tag::kTools:
      below(Tag::kMessage);
      break;
    case Tag::kCall:
      if (!is_open(Tag::kTools)) {
        fault("a call outside the tools channel");
        below(Tag::kMessage);
        stack_.push_back(Tag::kTools);
      }
      below(Tag::kTools);
      return begin_call(attributes, events);
    case Tag::kArgument:
    case Tag::kJson:
      if (!is_open(Tag::kCall)) return fault(fmt::format("'{}' outside a call", name));
      below(Tag::kCall);
      if (tag == Tag::kArgument) return begin_argument(attributes, events);
      ++values_;
      break;
    case Tag::kUnknown:
      fault(fmt::format("unknown tag '{}'", name));
      break;
  }
  waiting_.clear();
  stack_.push_back(tag);
}

// Closes what is open inside the innermost `tag`.
void ChatParser::close_down_to(Tag tag, std::string_view why, std::vector<ChatEvent>& events) {
  while (!stack_.empty() && stack_.back() != tag) {
    fault(fmt::format("{} closes '{}'", why, name_of(stack_.back())));
    close_top(events);
  }
}

void ChatParser::close_top(std::vector<ChatEvent>& events) {
  const Tag tag = stack_.back();
  if (tag == Tag::kArgument || tag == Tag::kJson) end_value(events);
  stack_.pop_back();
  waiting_.clear();
  if (tag != Tag::kCall) return;
  if (values_ == 0) arguments("{", events);
  arguments("}", events);
  events.push_back({ChatEvent::Kind::kCallEnd, calls_ - 1, {}});
}

void ChatParser::begin_call(const std::vector<Attribute>& attributes, std::vector<ChatEvent>& events) {
  std::string name;
  for (const Attribute& attribute : attributes) {
    if (attribute.key == "tool") name = attribute.value;
  }
  if (name.empty()) fault("a call without a tool");
  stack_.push_back(Tag::kCall);
  values_ = 0;
  events.push_back({ChatEvent::Kind::kCallBegin, calls_++, name});
}

void ChatParser::begin_argument(const std::vector<Attribute>& attributes, std::vector<ChatEvent>& events) {
  std::string key;
  bool has_key = false;
  type_.clear();
  for (const Attribute& attribute : attributes) {
    if (attribute.key == "key") {
      key = attribute.value;
      has_key = true;
    } else if (attribute.key == "type") {
      type_ = attribute.value;
    }
  }
  if (!has_key) fault("an argument without a key");
  if (type_.empty()) {
    fault("an argument without a type");
    type_ = "string";
  }
  stack_.push_back(Tag::kArgument);
  waiting_.clear();
  arguments(fmt::format("{}\"{}\": {}", values_++ == 0 ? "{" : ", ", json_escaped(key),
                        type_ == "string" ? "\"" : ""),
            events);
}

void ChatParser::end_value(std::vector<ChatEvent>& events) {
  const std::string value(trimmed(waiting_));
  if (stack_.back() == Tag::kArgument && type_ == "string") return arguments("\"", events);
  // The library takes a zero byte for the end of the text, whatever follows.
  Json json = Json::value_t::discarded;
  if (value.find('\0') == std::string::npos)
    json = Json::parse(value, /*cb=*/nullptr, /*allow_exceptions=*/false);
  if (stack_.back() == Tag::kArgument) {
    if (!json.is_discarded() && has_type(json, type_)) return arguments(value, events);
    fault(fmt::format("an argument that is not of its type {}", type_));
    return arguments("\"" + json_escaped(waiting_) + "\"", events);
  }
  // A json block is all arguments at once. Its closing brace is left to the end of the call.
  if (!json.is_object() || values_ > 1) {
    fault("a json block that is no object, or not alone");
    return arguments(fmt::format("{}\"json\": \"{}\"", values_ == 1 ? "{" : ", ", json_escaped(waiting_)),
                     events);
  }
  if (json.empty()) {
    values_ = 0;
  } else {
    arguments(value.substr(0, value.size() - 1), events);
  }
}

void ChatParser::arguments(std::string text, std::vector<ChatEvent>& events) {
  events.push_back({ChatEvent::Kind::kCallArguments, calls_ - 1, std::move(text)});
}

void add_event(const ChatEvent& event, ChatMessage& message) {
  message.role = ChatRole::kAssistant;
  switch (event.kind) {
    case ChatEvent::Kind::kReasoning:
      message.reasoning += event.text;
      break;
    case ChatEvent::Kind::kContent:
      if (message.content.empty()) message.content.emplace_back();
      message.content[0].text += event.text;
      break;
    case ChatEvent::Kind::kCallBegin:
      message.tool_calls.push_back({.name = event.text});
      break;
    case ChatEvent::Kind::kCallArguments:
      message.tool_calls[event.call].arguments += event.text;
      break;
    case ChatEvent::Kind::kCallEnd:
      break;
  }
}

ParsedTurn parse_turn(const Tokenizer& tokenizer, std::span<const int32_t> ids, bool thinking) {
  ChatParser parser(tokenizer, thinking);
  std::vector<ChatEvent> events;
  for (const int32_t id : ids) parser.push(id, events);
  parser.finish(events);
  ParsedTurn turn;
  turn.message.role = ChatRole::kAssistant;
  for (const ChatEvent& event : events) add_event(event, turn.message);
  turn.complete = parser.done();
  turn.faults = parser.faults();
  return turn;
}

}  // namespace godwit
