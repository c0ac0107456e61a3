#include "godwit/text/chat_json.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>

#include "godwit/base/check.h"

namespace godwit {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::pair<ChatRole, const char*> kRoles[] = {
    {ChatRole::kSystem, "system"},
    {ChatRole::kUser, "user"},
    {ChatRole::kAssistant, "assistant"},
    {ChatRole::kTool, "tool"},
    {ChatRole::kSystem, "developer"}};  // OpenAI's new word

constexpr int kDeepest = 200;  // nested JSON; writing it recurses

template <class AnyJson>
void check_depth(const AnyJson& value, std::string_view what, int depth = 0) {
  check(depth <= kDeepest, "{}: JSON nested deeper than {}", what, kDeepest);
  if (!value.is_structured()) return;
  for (const AnyJson& item : value) check_depth(item, what, depth + 1);
}

std::string dump(const Json& value, std::string_view what) {
  check_depth(value, what);
  return value.dump();
}

// The string under `key`; empty when absent or null. `where` is the object's own place, empty for the
// request.
std::string text_at(const Json& object, const char* key, const std::string& where) {
  const auto at = object.find(key);
  if (at == object.end() || at->is_null()) return {};
  check(at->is_string(), "{}{}{}: expected text, got {}", where, where.empty() ? "" : ".", key,
        at->type_name());
  return at->get<std::string>();
}

ChatPart text_part(std::string text) {
  ChatPart part;
  part.text = std::move(text);
  return part;
}

ChatPart part_from_json(const Json& part, const std::string& where) {
  check(part.is_object(), "{}: expected an object with a type, got {}", where, part.type_name());
  const std::string type = text_at(part, "type", where);
  if (type == "text") {
    check(part.contains("text"), "{}.text: missing", where);
    return text_part(text_at(part, "text", where));
  }
  check(type == "image_url" || type == "image", "{}.type: expected text or image_url, got '{}'", where, type);
  const auto at = part.find("image_url");
  check(at != part.end(), "{}.image_url: missing", where);
  ChatPart image;
  image.is_image = true;
  image.image_url =
      at->is_object() ? text_at(*at, "url", where + ".image_url") : text_at(part, "image_url", where);
  check(!image.image_url.empty(), "{}.image_url: the url is empty", where);
  // How large a picture is shown is the processor's to say: OpenAI's words for it change nothing.
  const std::string detail = at->is_object() ? text_at(*at, "detail", where + ".image_url") : "";
  check(detail.empty() || detail == "auto" || detail == "low" || detail == "high",
        "{}.image_url.detail: expected auto, low or high, got '{}'", where, detail);
  return image;
}

std::vector<ChatPart> content_from_json(const Json& content, const std::string& where) {
  if (content.is_null()) return {};
  if (content.is_string()) return {text_part(content.get<std::string>())};
  check(content.is_array(), "{}: expected text or a list of parts, got {}", where, content.type_name());
  std::vector<ChatPart> parts;
  for (const Json& part : content) {
    parts.push_back(part_from_json(part, fmt::format("{}[{}]", where, parts.size())));
  }
  return parts;
}

ChatToolCall call_from_json(const Json& call, const std::string& where) {
  check(call.is_object(), "{}: expected an object, got {}", where, call.type_name());
  const Json& function = call.contains("function") ? call["function"] : call;
  check(function.is_object(), "{}.function: expected an object, got {}", where, function.type_name());
  ChatToolCall out{.id = text_at(call, "id", where), .name = text_at(function, "name", where + ".function")};
  check(!out.name.empty(), "{}.function.name: missing", where);
  const auto arguments = function.find("arguments");
  if (arguments != function.end() && arguments->is_object()) {
    out.arguments = dump(*arguments, where + ".function.arguments");
  } else {
    out.arguments = text_at(function, "arguments", where + ".function");
  }
  return out;
}

ChatMessage message_from_json(const Json& message, const std::string& where) {
  check(message.is_object(), "{}: expected an object, got {}", where, message.type_name());
  const std::string role = text_at(message, "role", where);
  ChatMessage out;
  bool known = false;
  for (const auto& [value, name] : kRoles) {
    if (role != name) continue;
    out.role = value;
    known = true;
  }
  check(known, "{}.role: expected system, developer, user, assistant or tool, got '{}'", where, role);
  out.name = text_at(message, "name", where);
  if (out.name.empty() && out.role == ChatRole::kTool) out.name = text_at(message, "tool", where);
  if (message.contains("content")) out.content = content_from_json(message["content"], where + ".content");
  out.reasoning = text_at(message, "reasoning_content", where);
  if (out.reasoning.empty()) out.reasoning = text_at(message, "reasoning", where);
  out.tool_call_id = text_at(message, "tool_call_id", where);
  if (const auto tools = message.find("tools"); tools != message.end() && !tools->is_null()) {
    check(tools->is_array(), "{}.tools: expected a list, got {}", where, tools->type_name());
    if (!tools->empty()) out.tools = dump(*tools, where + ".tools");
  }
  if (const auto calls = message.find("tool_calls"); calls != message.end() && !calls->is_null()) {
    check(calls->is_array(), "{}.tool_calls: expected a list, got {}", where, calls->type_name());
    for (const Json& call : *calls) {
      out.tool_calls.push_back(
          call_from_json(call, fmt::format("{}.tool_calls[{}]", where, out.tool_calls.size())));
    }
  }
  if (const auto weight = message.find("weight"); weight != message.end()) {
    check(weight->is_number() && (*weight == 0 || *weight == 1), "{}.weight: expected 0 or 1", where);
    out.train = *weight == 1;
  }
  return out;
}

// Python's repr of a float: the shortest digits that read back, with an exponent below 1e-4 and from 1e16 on.
std::string python_float(double value) {
  check(std::isfinite(value), "chat: JSON has no infinities and no NaN");
  std::array<char, 64> buffer;
  const double size = std::fabs(value);
  const bool plain = value == 0 || (size >= 1e-4 && size < 1e16);
  const auto format = plain ? std::chars_format::fixed : std::chars_format::scientific;
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, format).ptr;
  std::string text(buffer.data(), end);
  if (plain && text.find('.') == std::string::npos) text += ".0";
  return text;
}

std::string python_style(const Json& value) {
  if (value.is_number_float()) return python_float(value.get<double>());
  if (!value.is_structured()) return value.dump();
  std::string out(1, value.is_array() ? '[' : '{');
  for (const auto& [key, item] : value.items()) {
    if (out.size() > 1) out += ", ";
    if (value.is_object()) out += Json(key).dump() + ": ";
    out += python_style(item);
  }
  out += value.is_array() ? ']' : '}';
  return out;
}

}  // namespace

std::vector<ChatMessage> messages_from_json(const Json& messages) {
  check(messages.is_array(), "messages: expected a list, got {}", messages.type_name());
  std::vector<ChatMessage> out;
  for (const Json& message : messages)
    out.push_back(message_from_json(message, fmt::format("messages[{}]", out.size())));
  return out;
}

namespace {

void check_only(const Json& object, const std::string& where, std::initializer_list<std::string_view> keys) {
  for (const auto& [key, value] : object.items())
    check(std::find(keys.begin(), keys.end(), key) != keys.end(), "{}.{}: there is no such key", where, key);
}

// The name in {"type": "function", "function": {"name": ...}}.
std::string chosen_function(const Json& choice, const std::string& where) {
  check(choice.is_object(), "{}: expected an object, got {}", where, choice.type_name());
  const std::string type = text_at(choice, "type", where);
  check(type == "function", "{}.type: expected function, got '{}'", where, type);
  const Json& function = choice.contains("function") ? choice["function"] : choice;
  check(function.is_object(), "{}.function: expected an object, got {}", where, function.type_name());
  check_only(choice, where, {"type", "function", "name"});
  if (&function != &choice) check_only(function, where + ".function", {"name"});
  std::string name = text_at(function, "name", where + ".function");
  check(!name.empty(), "{}.function.name: missing", where);
  return name;
}

// {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required", "tools": [functions]}}.
void read_allowed_tools(const Json& choice, ChatOptions& out) {
  const std::string where = "tool_choice.allowed_tools";
  const auto allowed = choice.find("allowed_tools");
  check(allowed != choice.end() && allowed->is_object(), "{}: expected an object", where);
  check_only(choice, "tool_choice", {"type", "allowed_tools"});
  check_only(*allowed, where, {"mode", "tools"});
  const std::string mode = text_at(*allowed, "mode", where);
  check(mode == "auto" || mode == "required", "{}.mode: expected auto or required, got '{}'", where, mode);
  const auto tools = allowed->find("tools");
  check(tools != allowed->end() && tools->is_array() && !tools->empty(), "{}.tools: expected a list of tools",
        where);
  for (const Json& tool : *tools)
    out.tool_names.push_back(
        chosen_function(tool, fmt::format("{}.tools[{}]", where, out.tool_names.size())));
  if (mode == "required") out.tool_choice = ToolChoice::kRequired;
}

// "auto", "none", "required", the one function to call, or those that may be called.
void read_tool_choice(const Json& request, ChatOptions& out) {
  const auto given = request.find("tool_choice");
  if (given != request.end() && given->is_object()) {
    const std::string type = text_at(*given, "type", "tool_choice");
    if (type == "allowed_tools") {
      read_allowed_tools(*given, out);
    } else {
      check(type == "function", "tool_choice.type: expected function or allowed_tools, got '{}'", type);
      out.tool_names = {chosen_function(*given, "tool_choice")};
      out.tool_choice = ToolChoice::kRequired;
    }
  } else {
    const std::string choice = text_at(request, "tool_choice", "");
    check(choice.empty() || choice == "auto" || choice == "none" || choice == "required",
          "tool_choice: expected auto, none, required or a function, got '{}'", choice);
    if (choice == "none") out.tool_choice = ToolChoice::kNone;
    if (choice == "required") out.tool_choice = ToolChoice::kRequired;
  }
  if (const auto parallel = request.find("parallel_tool_calls");
      parallel != request.end() && !parallel->is_null()) {
    check(parallel->is_boolean(), "parallel_tool_calls: expected true or false, got {}",
          parallel->type_name());
    out.parallel_calls = parallel->get<bool>();
  }
}

// true, false, or {"type": "enabled" | "disabled"} as Kimi's own service has it. None: nothing is said.
std::optional<bool> thinking_flag(const Json& object, const char* key, const std::string& where) {
  const auto at = object.find(key);
  if (at == object.end() || at->is_null()) return std::nullopt;
  if (at->is_boolean()) return at->get<bool>();
  const std::string type = at->is_object() && at->size() == 1 ? text_at(*at, "type", where) : "";
  check(type == "enabled" || type == "disabled",
        "{}: expected true, false or {{\"type\": \"enabled\"}} or \"disabled\"", where);
  return type == "enabled";
}

// How much the model is to think. K3 knows low, high and max, under its own key; OpenAI's words are brought
// to the nearest of them.
void read_thinking(const Json& request, ChatOptions& out) {
  std::optional<bool> thinking = thinking_flag(request, "thinking", "thinking");
  out.thinking_effort = text_at(request, "thinking_effort", "");
  std::string effort = text_at(request, "reasoning_effort", "");
  if (const auto kwargs = request.find("chat_template_kwargs");
      kwargs != request.end() && !kwargs->is_null()) {
    const std::string where = "chat_template_kwargs";
    check(kwargs->is_object(), "{}: expected an object, got {}", where, kwargs->type_name());
    for (const auto& [key, value] : kwargs->items()) {
      const std::string at = where + "." + key;
      if (key == "thinking" || key == "enable_thinking") {
        const auto here = thinking_flag(*kwargs, key.c_str(), at);
        check(!thinking || !here || thinking == here, "{}: goes against another word about thinking", at);
        if (here) thinking = here;
      } else if (key == "thinking_effort") {
        out.thinking_effort = text_at(*kwargs, "thinking_effort", where);
      } else if (key == "reasoning_effort") {
        effort = text_at(*kwargs, "reasoning_effort", where);
      } else {
        fail(
            "{}: the chat format has no such word; it has thinking, enable_thinking, thinking_effort and "
            "reasoning_effort",
            at);
      }
    }
  }
  const std::string& own = out.thinking_effort;
  check(own.empty() || own == "low" || own == "high" || own == "max",
        "thinking_effort: expected low, high or max, got '{}'", own);
  static constexpr std::pair<std::string_view, const char*> kNearest[] = {
      {"minimal", "low"}, {"low", "low"},   {"medium", "high"},
      {"high", "high"},   {"xhigh", "max"}, {"max", "max"}};
  const char* nearest = nullptr;
  for (const auto& [word, meant] : kNearest) {
    if (effort == word) nearest = meant;
  }
  check(effort.empty() || effort == "none" || nearest,
        "reasoning_effort: expected none, minimal, low, medium, high, xhigh or max, got '{}'", effort);
  if (effort == "none") {
    check(!thinking.value_or(false), "reasoning_effort: none goes against thinking: true");
    thinking = false;
  }
  check(thinking.value_or(true) || !nearest, "reasoning_effort: does not go without thinking");
  if (own.empty() && nearest) out.thinking_effort = nearest;
  out.thinking = thinking.value_or(true);
}

// {"type": "text" | "json_object" | "json_schema", "json_schema": {"schema": ...}}; as other servers have it,
// "schema" may also stand beside the type.
void read_response_format(const Json& request, ChatOptions& out) {
  const auto format = request.find("response_format");
  if (format == request.end() || format->is_null()) return;
  check(format->is_object(), "response_format: expected an object, got {}", format->type_name());
  const std::string type = text_at(*format, "type", "response_format");
  check(type == "text" || type == "json_object" || type == "json_schema",
        "response_format.type: expected text, json_object or json_schema, got '{}'", type);
  for (const auto& [key, value] : format->items()) {
    const bool known = key == "type" || (type != "text" && key == "schema") ||
                       (type == "json_schema" && key == "json_schema");
    check(known || value.is_null(), "response_format.{}: does not go with {}", key, type);
  }
  out.json_response = type != "text";
  const auto named = format->find("json_schema");
  if (named != format->end() && named->is_object()) {
    const std::string where = "response_format.json_schema";
    check_only(*named, where, {"name", "description", "schema", "strict"});
    for (const char* key : {"name", "description"}) text_at(*named, key, where);  // or an error
    const auto strict = named->find("strict");
    check(strict == named->end() || strict->is_null() || strict->is_boolean(),
          "{}.strict: expected true or false", where);
  }
  const Json& holder = named != format->end() && named->is_object() ? *named : *format;
  const auto schema = holder.find("schema");
  const bool given = schema != holder.end() && !schema->is_null();
  check(given || type != "json_schema", "response_format.json_schema.schema: missing");
  if (given && type != "text") out.response_schema = dump(*schema, "response_format");
}

}  // namespace

ChatOptions chat_options_from_json(const Json& request) {
  check(request.is_object(), "request: expected an object, got {}", request.type_name());
  ChatOptions out;
  if (const auto tools = request.find("tools"); tools != request.end() && !tools->is_null()) {
    check(tools->is_array(), "tools: expected a list, got {}", tools->type_name());
    if (!tools->empty()) out.tools = dump(*tools, "tools");
  }
  read_tool_choice(request, out);
  read_thinking(request, out);
  read_response_format(request, out);
  return out;
}

Json message_to_json(const ChatMessage& message) {
  Json out = Json::object();
  for (const auto& [value, name] : kRoles) {
    if (message.role == value && !out.contains("role")) out["role"] = name;
  }
  if (!message.name.empty()) out["name"] = message.name;
  if (!message.tool_call_id.empty()) out["tool_call_id"] = message.tool_call_id;
  if (!message.reasoning.empty()) out["reasoning_content"] = message.reasoning;
  if (message.content.size() == 1 && !message.content[0].is_image) {
    out["content"] = message.content[0].text;
  } else if (message.content.empty()) {
    out["content"] = message.tool_calls.empty() ? Json("") : Json(nullptr);
  } else {
    for (const ChatPart& part : message.content) {
      out["content"].push_back(part.is_image
                                   ? Json{{"type", "image_url"}, {"image_url", {{"url", part.image_url}}}}
                                   : Json{{"type", "text"}, {"text", part.text}});
    }
  }
  for (const ChatToolCall& call : message.tool_calls) {
    out["tool_calls"].push_back({{"id", call.id},
                                 {"type", "function"},
                                 {"function", {{"name", call.name}, {"arguments", call.arguments}}}});
  }
  if (!message.tools.empty()) out["tools"] = Json::parse(message.tools);
  return out;
}

std::string json_sorted_compact(std::string_view json, const char* what) {
  try {
    const nlohmann::json value = nlohmann::json::parse(json);  // nlohmann::json keeps objects sorted by key
    check_depth(value, what);
    return value.dump();
  } catch (const nlohmann::json::exception& error) {
    fail("{}: invalid JSON: {}", what, error.what());
  }
}

std::string json_python_style(const Json& value) {
  check_depth(value, "arguments");
  return python_style(value);
}

}  // namespace godwit
