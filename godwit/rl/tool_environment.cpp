#include "godwit/rl/tool_environment.h"

#include <algorithm>
#include <charconv>

#include "godwit/base/check.h"
#include "godwit/base/rng.h"

namespace godwit::rl {
namespace {

using nlohmann::json;

constexpr uint64_t kStream = 0x656e7669726f6e;  // "environ"

ChatMessage result_of(const ChatToolCall& call, std::string text) {
  ChatMessage message;
  message.role = ChatRole::kTool;
  message.name = call.name;
  message.tool_call_id = call.id;
  message.content.push_back({.text = std::move(text)});
  return message;
}

}  // namespace

uint64_t Draws::bits() {
  return random_bits(seed_, kStream, counter_++);
}

Task ToolEnvironment::reset(uint64_t seed) {
  world = json::object();
  draws_ = Draws(seed);
  turns_ = 0;
  done_ = false;
  told_.clear();
  return begin(draws_);
}

ToolAnswer ToolEnvironment::answer(const ChatToolCall& tool_call, StepResult& result) {
  ++result.calls;
  const json arguments = json::parse(tool_call.arguments, nullptr, /*allow_exceptions=*/false);
  if (!arguments.is_object()) return {.text = "error: the arguments are no JSON object", .wrong = true};
  const std::string key = tool_call.name + arguments.dump();
  const json before = world;
  ToolAnswer out;
  try {
    out = call(tool_call.name, arguments, draws_);
  } catch (const json::exception&) {
    world = before;
    return {.text = "error: wrong arguments", .wrong = true};
  }
  if (world != before) told_.clear();
  const bool repeated = !told_.insert(key).second;
  if (out.fault || out.wrong)
    told_.erase(key);
  else if (repeated && world == before)
    ++result.redundant;
  return out;
}

StepResult ToolEnvironment::step(const ChatMessage& turn) {
  check(!done_, "environment: a step after the end of the episode");
  StepResult result;
  ++turns_;
  if (turn.tool_calls.empty()) {
    const Reply reply = respond(text_of(turn));
    result.done = reply.done;
    result.success = reply.success;
    result.reward = reply.reward;
    if (reply.done)
      result.reason = "answered";
    else
      result.messages.push_back(user_says(reply.next));
  }
  for (size_t i = 0; i < turn.tool_calls.size() && !result.done; ++i) {
    const ChatToolCall& tool_call = turn.tool_calls[i];
    ToolAnswer out{.text = "error: too many calls in one turn", .wrong = true};
    if (static_cast<int64_t>(i) < limits_.calls) out = answer(tool_call, result);
    result.faults += out.fault;
    result.wrong += out.wrong;
    result.checked += out.checked;
    result.valid += out.valid;
    result.reward += out.reward;
    result.done = out.done;
    result.success = out.success;
    if (out.done) result.reason = "finished";
    result.messages.push_back(result_of(tool_call, std::move(out.text)));
  }
  if (!result.done && turns_ >= limits_.turns) {
    result.done = true;
    result.reason = "turns";
  }
  done_ = result.done;
  if (done_) result.messages.clear();
  return result;
}

std::string ToolEnvironment::save() const {
  return json{{"world", world},  {"seed", draws_.seed()}, {"counter", draws_.counter()},
              {"turns", turns_}, {"done", done_},         {"told", told_}}
      .dump();
}

void ToolEnvironment::load(std::string_view saved) {
  const json state = json::parse(saved);
  world = state.at("world");
  draws_ = Draws(state.at("seed"), state.at("counter"));
  turns_ = state.at("turns");
  done_ = state.at("done");
  told_ = state.at("told").get<std::set<std::string>>();
}

uint64_t ToolEnvironment::state_hash() const {
  return hash_text(world.dump());
}

uint64_t hash_text(std::string_view text) {  // FNV-1a
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (const unsigned char c : text) hash = (hash ^ c) * 0x100000001b3ULL;
  return hash;
}

std::string text_of(const ChatMessage& message) {
  std::string text;
  for (const ChatPart& part : message.content) text += part.text;
  return text;
}

ChatMessage user_says(std::string text) {
  ChatMessage message;
  message.role = ChatRole::kUser;
  message.content.push_back({.text = std::move(text)});
  return message;
}

ChatMessage assistant_says(std::string text) {
  ChatMessage message = user_says(std::move(text));
  message.role = ChatRole::kAssistant;
  return message;
}

ChatMessage assistant_calls(const std::string& tool, const nlohmann::ordered_json& arguments) {
  ChatMessage message;
  message.role = ChatRole::kAssistant;
  message.tool_calls.push_back({.id = "call_0", .name = tool, .arguments = arguments.dump()});
  return message;
}

json tool_declaration(const std::string& name, const std::string& description, const json& parameters) {
  json properties = json::object(), required = json::array();
  for (const auto& [key, type] : parameters.items()) {
    properties[key] = {{"type", type}};
    required.push_back(key);
  }
  return {{"type", "function"},
          {"function",
           {{"name", name},
            {"description", description},
            {"parameters", {{"type", "object"}, {"properties", properties}, {"required", required}}}}}};
}

bool read_integer(std::string_view text, int64_t& value) {
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  const auto* begin = std::find_if(text.begin(), text.end(), digit);
  const auto* end = std::find_if_not(begin, text.end(), digit);
  if (begin == end || std::any_of(end, text.end(), digit)) return false;
  const bool negative = begin != text.begin() && begin[-1] == '-';
  const auto parsed = std::from_chars(begin, end, value);
  if (parsed.ec != std::errc() || parsed.ptr != end) return false;
  if (negative) value = -value;
  return true;
}

void check_options(const std::string& environment, const json& options,
                   const std::vector<std::string>& known) {
  check(options.is_object(), "environment {}: options must be a table", environment);
  for (const auto& [key, value] : options.items()) {
    std::string names;
    for (const std::string& name : known) names += (names.empty() ? "" : ", ") + name;
    check(std::find(known.begin(), known.end(), key) != known.end(),
          "environment {}: unknown option {}; known: {}", environment, key, names);
  }
}

}  // namespace godwit::rl
