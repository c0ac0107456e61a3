#include "godwit/text/chat_format.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "godwit/base/check.h"
#include "godwit/text/chat_json.h"
#include "godwit/text/unicode.h"
#include "godwit/text/utf8.h"

namespace godwit {
namespace {

using Json = nlohmann::ordered_json;

std::string escape_attribute(std::string_view value) {
  std::string out;
  for (const char c : value) {
    if (c == '&') {
      out += "&amp;";
    } else if (c == '"') {
      out += "&quot;";
    } else {
      out += c;
    }
  }
  return out;
}

// White space as Python's str.strip() knows it: White_Space and the four information separators.
bool is_blank(std::string_view text) {
  for (size_t pos = 0; pos < text.size();) {
    const Utf8Char c = decode_utf8(text, pos);
    if ((char_classes()[c.code] & kSpace) == 0 && (c.code < 0x1c || c.code > 0x1f)) return false;
    pos += c.length;
  }
  return true;
}

std::string media_prompt(const char* kind, int64_t width, int64_t height, int64_t tokens) {
  std::string prompt = fmt::format("{}{} {}x{}{}", kMediaBegin, kind, width, height, kMediaContent);
  for (int64_t i = 0; i < tokens; ++i) prompt += kMediaPad;
  return prompt + std::string(kMediaEnd);
}

const char* type_of(const Json& value) {
  if (value.is_boolean()) return "boolean";
  if (value.is_null()) return "null";
  if (value.is_number()) return "number";
  if (value.is_string()) return "string";
  return value.is_object() ? "object" : "array";
}

using Attributes = std::vector<std::pair<const char*, std::string>>;

class Writer {
 public:
  explicit Writer(const ChatOptions& options) : options_(options) {}

  void header();
  void messages(std::span<const ChatMessage> messages);
  void footer();
  void follow(const ChatMessage& assistant) { begin_turn(assistant); }
  std::vector<ChatSegment> take() { return std::move(segments_); }

 private:
  // Segments without text vanish.
  void add(std::string_view text, bool control) {
    if (!text.empty()) segments_.push_back({std::string(text), control, trained_});
  }
  void control(std::string_view text) { add(text, /*control=*/true); }
  void text(std::string_view text) { add(text, /*control=*/false); }
  void open(std::string_view tag, const Attributes& attributes = {});
  void close(std::string_view tag);
  void system_message(const char* type, std::string_view body);
  void content(const std::vector<ChatPart>& parts);
  void plain_message(const ChatMessage& message, const char* role);
  void assistant(const ChatMessage& message);
  void tool_call(const ChatToolCall& call, size_t index);
  void tool_results(std::span<const ChatMessage> results);
  void begin_turn(const ChatMessage& assistant) {
    calls_ = assistant.tool_calls;
    results_ = 0;
  }
  std::string where() const { return fmt::format("messages[{}]", index_); }

  const ChatOptions& options_;
  std::vector<ChatSegment> segments_;
  std::vector<ChatToolCall> calls_;  // of the last assistant's turn
  size_t results_ = 0;               // tool messages since
  size_t index_ = 0;                 // of the message, for errors
  bool trained_ = false;
};

void Writer::open(std::string_view tag, const Attributes& attributes) {
  control(kOpen);
  text(tag);
  for (const auto& [key, value] : attributes) {
    text(fmt::format(" {}", key));
    text("=\"");
    text(escape_attribute(value));
    text("\"");
  }
  control(kSep);
}

void Writer::close(std::string_view tag) {
  control(kClose);
  text(tag);
  control(kSep);
}

void Writer::system_message(const char* type, std::string_view body) {
  open("message", {{"role", "system"}, {"type", type}});
  text(body);
  close("message");
  control(kEndOfMsg);
}

void Writer::content(const std::vector<ChatPart>& parts) {
  for (const ChatPart& part : parts) {
    if (!part.is_image) {
      text(part.text);
      continue;
    }
    check(part.width > 0 && part.height > 0 && part.tokens > 0,
          "{}: an image without size: {}x{} pixels, {} tokens", where(), part.width, part.height,
          part.tokens);
    control(image_prompt(part.width, part.height, part.tokens));
  }
}

void Writer::header() {
  if (!options_.tools.empty()) {
    system_message(
        "tool-declare",
        fmt::format("# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```",
                    json_sorted_compact(options_.tools, "tools")));
  }
  if (!options_.thinking || options_.thinking_effort.empty()) return;
  const std::string& effort = options_.thinking_effort;
  check(effort == "low" || effort == "high" || effort == "max",
        "thinking_effort: expected low, high or max, got '{}'", effort);
  system_message("thinking-effort",
                 fmt::format("`thinking_effort` guides on how much to think in your thinking channel (not "
                             "including the response "
                             "channel), supported values include `low`, `medium`, `high`, and `max`.\n"
                             "Now the system is invoked with `thinking_effort={}`.",
                             effort));
}

void Writer::footer() {
  if (options_.tool_choice == ToolChoice::kRequired) {
    system_message(
        "tool-choice",
        "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.");
  } else if (options_.tool_choice == ToolChoice::kNone) {
    system_message(
        "tool-choice",
        "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.");
  }
  if (options_.json_response) {
    const bool schema = !options_.response_schema.empty();
    std::string body = fmt::format(
        "The system is invoked with `response_format={}`.\n"
        "Your response must be raw JSON data without markdown code blocks (```json) or any additional "
        "formatting.",
        schema ? "json_schema" : "json_object");
    if (schema) {
      body += fmt::format("\nThe JSON data must match the following schema:\n```json\n{}\n```",
                          json_sorted_compact(options_.response_schema, "response_format"));
    }
    system_message("response-format", body);
  }
  if (options_.generation_prompt) {
    open("message", {{"role", "assistant"}});
    open(options_.thinking ? "think" : "response");
  }
}

void Writer::plain_message(const ChatMessage& message, const char* role) {
  Attributes attributes = {{"role", role}};
  if (!message.name.empty()) attributes.emplace_back("name", message.name);
  open("message", attributes);
  content(message.content);
  close("message");
  control(kEndOfMsg);
}

void Writer::assistant(const ChatMessage& message) {
  Attributes attributes = {{"role", "assistant"}};
  if (!message.name.empty()) attributes.emplace_back("name", message.name);
  open("message", attributes);
  trained_ = message.train;
  if (options_.thinking) {
    open("think");
    if (!is_blank(message.reasoning)) text(message.reasoning);
    close("think");
  }
  open("response");
  content(message.content);
  close("response");
  if (!message.tool_calls.empty()) {
    open("tools");
    for (size_t i = 0; i < message.tool_calls.size(); ++i) tool_call(message.tool_calls[i], i + 1);
    close("tools");
  }
  close("message");
  control(kEndOfMsg);
  trained_ = false;
}

void Writer::tool_call(const ChatToolCall& call, size_t index) {
  check(!call.name.empty(), "{}.tool_calls[{}].function.name: a call without the tool's name", where(),
        index - 1);
  open("call", {{"tool", call.name}, {"index", std::to_string(index)}});
  if (!is_blank(call.arguments)) {
    const Json arguments = Json::parse(call.arguments, /*cb=*/nullptr, /*allow_exceptions=*/false);
    if (arguments.is_discarded()) {
      open("json", {{"type", "object"}});
      text(call.arguments);
      close("json");
    } else {
      check(arguments.is_object(), "{}.tool_calls[{}].function.arguments: expected a JSON object, got {}",
            where(), index - 1, arguments.type_name());
      for (const auto& [key, value] : arguments.items()) {
        open("argument", {{"key", key}, {"type", type_of(value)}});
        text(value.is_string() ? value.get<std::string>() : json_python_style(value));
        close("argument");
      }
    }
  }
  close("call");
}

// A run of tool messages, in the order of the calls they answer when every one names its call; otherwise as
// they come, each taken for the answer to the call at its place.
void Writer::tool_results(std::span<const ChatMessage> results) {
  struct Result {
    size_t call;
    const ChatMessage* message;
  };
  std::vector<Result> sorted;
  for (const ChatMessage& message : results) {
    const auto call = std::find_if(calls_.begin(), calls_.end(), [&](const ChatToolCall& c) {
      return !c.id.empty() && c.id == message.tool_call_id;
    });
    if (call != calls_.end()) sorted.push_back({static_cast<size_t>(call - calls_.begin()), &message});
  }
  const bool all_known = sorted.size() == results.size();
  if (all_known) {
    std::stable_sort(sorted.begin(), sorted.end(),
                     [](const Result& a, const Result& b) { return a.call < b.call; });
  }
  for (size_t i = 0; i < results.size(); ++i) {
    const ChatMessage& message = all_known ? *sorted[i].message : results[i];
    std::string tool = all_known ? calls_[sorted[i].call].name : message.name;
    if (tool.empty() && results_ < calls_.size()) tool = calls_[results_].name;
    check(!tool.empty(), "{}: a tool message needs the tool's name or the id of a call before it", where());
    open("message", {{"role", "tool"}, {"tool", tool}, {"index", std::to_string(++results_)}});
    content(message.content);
    close("message");
    control(kEndOfMsg);
    ++index_;
  }
}

void Writer::messages(std::span<const ChatMessage> messages) {
  while (index_ < messages.size()) {
    const ChatMessage& message = messages[index_];
    if (message.role == ChatRole::kTool) {
      size_t end = index_;
      while (end < messages.size() && messages[end].role == ChatRole::kTool) ++end;
      tool_results(messages.subspan(index_, end - index_));  // moves index_
      continue;
    }
    if (message.role == ChatRole::kAssistant) {
      assistant(message);
      begin_turn(message);
    } else if (message.role == ChatRole::kSystem && !message.tools.empty()) {
      system_message(
          "tool-declare",
          fmt::format("## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
                      "You have access to all existing and extended tools.\n"
                      "Here are the specs for the extended tools.\n\n```json\n{}\n```",
                      json_sorted_compact(message.tools, "tools")));
    } else {
      plain_message(message, message.role == ChatRole::kSystem ? "system" : "user");
    }
    ++index_;
  }
}

}  // namespace

std::string image_prompt(int64_t width, int64_t height, int64_t tokens) {
  return media_prompt("image", width, height, tokens);
}

std::string video_prompt(int64_t width, int64_t height, int64_t tokens) {
  return media_prompt("video", width, height, tokens);
}

std::vector<ChatSegment> render_chat(std::span<const ChatMessage> messages, const ChatOptions& options) {
  Writer writer(options);
  writer.header();
  writer.messages(messages);
  writer.footer();
  return writer.take();
}

std::vector<ChatSegment> render_continuation(const ChatMessage& assistant,
                                             std::span<const ChatMessage> messages,
                                             const ChatOptions& options) {
  Writer writer(options);
  writer.follow(assistant);
  writer.messages(messages);
  writer.footer();
  return writer.take();
}

ChatIds encode_chat(std::span<const ChatSegment> segments, const Tokenizer& tokenizer) {
  for (const std::string_view name : {kOpen, kClose, kSep, kEndOfMsg})
    tokenizer.special_id(name);  // or an Error
  ChatIds out;
  for (const ChatSegment& segment : segments) {
    if (segment.control) {
      const std::vector<int32_t> ids = tokenizer.encode_with_specials(segment.text);
      out.ids.insert(out.ids.end(), ids.begin(), ids.end());
    } else {
      tokenizer.encode_append(segment.text, out.ids, {.cut_long = true});
    }
    out.trained.resize(out.ids.size(), segment.trained ? 1 : 0);
  }
  return out;
}

std::string chat_text(std::span<const ChatSegment> segments) {
  std::string out;
  for (const ChatSegment& segment : segments) out += segment.text;
  return out;
}

}  // namespace godwit
