#include "godwit/serve/protocol.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <utility>

#include "godwit/serve/request_body.h"
#include "godwit/text/chat_json.h"
#include "godwit/text/utf8.h"

namespace godwit::serve {
namespace {

constexpr size_t kMostStops = 16;
constexpr size_t kLongestStop = 1024;  // bytes; every piece of text is looked through for it
constexpr size_t kMostStopIds = 64;
constexpr int64_t kMostChoices = 128;
constexpr int64_t kMostTokens = int64_t{1} << 53;  // what a double holds: "without limit" in JavaScript
constexpr size_t kMostTools = 1024;

[[noreturn]] void refuse(const std::string& key, const std::string& message) {
  throw ApiError(400, fmt::format("{}: {}", key, message), key);
}

// A value of the request, if it is there and not null.
const Json* find(const Json& request, const char* key) {
  const auto it = request.find(key);
  return it == request.end() || it->is_null() ? nullptr : &*it;
}

double number(const Json& request, const char* key, double fallback, double low, double high) {
  const Json* value = find(request, key);
  if (!value) return fallback;
  if (!value->is_number()) refuse(key, "must be a number");
  const auto x = value->get<double>();
  if (!(x >= low && x <= high)) refuse(key, fmt::format("must be {} to {}, got {}", low, high, x));
  return x;
}

int64_t integer(const Json& request, const char* key, int64_t fallback, int64_t low, int64_t high) {
  const Json* value = find(request, key);
  if (!value) return fallback;
  const bool whole = value->is_number_integer() ||
                     (value->is_number_float() && std::trunc(value->get<double>()) == value->get<double>());
  if (!whole) refuse(key, "must be a whole number");
  const auto x = value->get<double>();
  if (!(x >= static_cast<double>(low) && x <= static_cast<double>(high)))
    refuse(key, fmt::format("must be {} to {}, got {}", low, high, x));
  return value->is_number_float() ? static_cast<int64_t>(x) : value->get<int64_t>();
}

bool flag(const Json& request, const char* key, bool fallback) {
  const Json* value = find(request, key);
  if (!value) return fallback;
  if (!value->is_boolean()) refuse(key, "must be true or false");
  return value->get<bool>();
}

// False where it is not there. `where` is the place of the object.
bool nested_flag(const Json& object, const std::string& where, const char* key) {
  const Json* value = find(object, key);
  if (value && !value->is_boolean()) refuse(where + "." + key, "must be true or false");
  return value && value->get<bool>();
}

std::vector<std::string> stop_strings(const Json& request) {
  const Json* value = find(request, "stop");
  std::vector<std::string> out;
  if (!value) return out;
  const Json list = value->is_string() ? Json::array({*value}) : *value;
  if (!list.is_array()) refuse("stop", "must be a text or a list of texts");
  if (list.size() > kMostStops)
    refuse("stop", fmt::format("at most {} texts, got {}", kMostStops, list.size()));
  for (const Json& item : list) {
    if (!item.is_string() || item.get_ref<const std::string&>().empty())
      refuse("stop", "must hold texts that are not empty");
    out.push_back(item.get<std::string>());
    if (out.back().size() > kLongestStop)
      refuse("stop", fmt::format("texts of at most {} bytes, got {}", kLongestStop, out.back().size()));
  }
  return out;
}

// Ids that end the text and are no part of it; beside OpenAI's keys.
std::vector<int32_t> stop_token_ids(const Json& request) {
  const Json* value = find(request, "stop_token_ids");
  std::vector<int32_t> out;
  if (!value) return out;
  if (!value->is_array()) refuse("stop_token_ids", "must be a list of token ids");
  if (value->size() > kMostStopIds)
    refuse("stop_token_ids", fmt::format("at most {} ids, got {}", kMostStopIds, value->size()));
  for (const Json& item : *value) {
    const bool id = item.is_number_integer() && item >= 0 && item <= std::numeric_limits<int32_t>::max();
    if (!id) refuse("stop_token_ids", "must hold token ids");
    out.push_back(item.get<int32_t>());
  }
  return out;
}

std::vector<std::pair<int32_t, double>> logit_bias(const Json& request) {
  const Json* value = find(request, "logit_bias");
  std::vector<std::pair<int32_t, double>> out;
  if (!value) return out;
  if (!value->is_object()) refuse("logit_bias", "must map token ids to numbers");
  for (const auto& [key, bias] : value->items()) {
    if (key.empty() || key.size() > 9 || key.find_first_not_of("0123456789") != std::string::npos)
      refuse("logit_bias", fmt::format("'{}' is no token id", replace_invalid_utf8(key)));
    if (!bias.is_number() || std::abs(bias.get<double>()) > 100)
      refuse("logit_bias", "values must be -100 to 100");
    out.emplace_back(std::stoi(key), bias.get<double>());
  }
  return out;
}

uint64_t random_seed() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

}  // namespace

CompletionParams completion_params(const Json& request, bool chat) {
  CompletionParams p;
  SamplingParams& s = p.sampling;
  s.temperature = number(request, "temperature", 1.0, 0.0, 2.0);
  s.top_p = number(request, "top_p", 1.0, 0.0, 1.0);
  s.top_k = integer(request, "top_k", 0, -1, INT32_MAX);
  s.top_k = std::max<int64_t>(s.top_k, 0);
  s.min_p = number(request, "min_p", 0.0, 0.0, 1.0);
  s.presence_penalty = number(request, "presence_penalty", 0.0, -2.0, 2.0);
  s.frequency_penalty = number(request, "frequency_penalty", 0.0, -2.0, 2.0);
  s.repetition_penalty = number(request, "repetition_penalty", 1.0, 0.01, 10.0);
  s.logit_bias = logit_bias(request);
  if (const Json* seed = find(request, "seed")) {
    if (!seed->is_number_integer()) refuse("seed", "must be a whole number of at most 64 bits");
    s.seed = seed->get<uint64_t>();
  } else {
    s.seed = random_seed();
  }
  const char* limit = chat && find(request, "max_completion_tokens") ? "max_completion_tokens" : "max_tokens";
  if (find(request, limit)) p.max_tokens = integer(request, limit, 0, 1, kMostTokens);
  p.min_tokens = integer(request, "min_tokens", 0, 0, kMostTokens);
  if (p.max_tokens && p.min_tokens > *p.max_tokens)
    refuse("min_tokens", fmt::format("is above {}: {}", limit, *p.max_tokens));
  p.ignore_eos = flag(request, "ignore_eos", false);
  p.choices = integer(request, "n", 1, 1, kMostChoices);
  if (!chat && integer(request, "best_of", p.choices, 1, kMostChoices) != p.choices)
    refuse("best_of", "only the value of n is supported");
  p.stream = flag(request, "stream", false);
  if (const Json* options = find(request, "stream_options")) {
    if (!options->is_object()) refuse("stream_options", "must be an object");
    if (!p.stream) refuse("stream_options", "goes with stream: true");
    for (const auto& [key, value] : options->items()) {
      // What hides the length of pieces from who listens on the line has nothing to hide here.
      if (key != "include_usage" && key != "continuous_usage_stats" && key != "include_obfuscation")
        refuse("stream_options." + replace_invalid_utf8(key), "not supported");
    }
    p.continuous_usage = nested_flag(*options, "stream_options", "continuous_usage_stats");
    p.include_usage = nested_flag(*options, "stream_options", "include_usage");
  }
  p.stop = stop_strings(request);
  p.include_stop = flag(request, "include_stop_str_in_output", false);
  p.stop_ids = stop_token_ids(request);
  if (chat) {
    p.logprobs = flag(request, "logprobs", false);
    p.top_logprobs = integer(request, "top_logprobs", 0, 0, 20);
    if (p.top_logprobs > 0 && !p.logprobs) refuse("top_logprobs", "goes with logprobs: true");
  } else if (find(request, "logprobs")) {
    p.logprobs = true;
    p.top_logprobs = integer(request, "logprobs", 0, 0, 20);
  }
  p.echo = !chat && flag(request, "echo", false);
  if (p.echo && p.logprobs) refuse("echo", "with logprobs is not supported: the prompt's are not kept");
  return p;
}

void check_ids(const CompletionParams& params, int64_t vocab_size) {
  const auto check_id = [&](const char* key, int32_t id) {
    if (id >= vocab_size)
      refuse(key, fmt::format("there is no token id {}; the vocabulary has {}", id, vocab_size));
  };
  for (const auto& [id, bias] : params.sampling.logit_bias) check_id("logit_bias", id);
  for (const int32_t id : params.stop_ids) check_id("stop_token_ids", id);
}

namespace {

// A declared tool, as the grammar takes it. OpenAI's form, or the function alone.
TurnFormat::Tool tool_of(const Json& declared, const std::string& place) {
  if (!declared.is_object()) refuse(place, "must be an object");
  const Json* type = find(declared, "type");
  const bool wrapped = declared.contains("function");
  if (type && *type != "function") refuse(place + ".type", "only function is supported");
  if (type && !wrapped && !declared.contains("name")) refuse(place + ".function", "is needed");
  const Json& function = wrapped ? declared["function"] : declared;
  const std::string where = wrapped ? place + ".function" : place;
  if (!function.is_object()) refuse(where, "must be an object");
  const Json* name = find(function, "name");
  if (!name || !name->is_string() || name->get_ref<const std::string&>().empty())
    refuse(where + ".name", "a name is needed");
  const Json* description = find(function, "description");
  if (description && !description->is_string()) refuse(where + ".description", "must be a text");
  const Json* parameters = find(function, "parameters");
  if (parameters && !parameters->is_object()) refuse(where + ".parameters", "must be a JSON schema");
  return {.name = name->get<std::string>(),
          .parameters = parameters ? *parameters : Json(nullptr),
          .strict = nested_flag(function, where, "strict")};
}

// The tools of the request and of its messages. Throws ApiError 400.
std::vector<TurnFormat::Tool> declared_tools(const ChatRequest& chat) {
  std::vector<TurnFormat::Tool> out;
  const auto add = [&](const std::string& list, const std::string& where) {
    if (list.empty()) return;
    size_t place = 0;
    for (const Json& declared : Json::parse(list)) {
      const std::string at = fmt::format("{}[{}]", where, place++);
      TurnFormat::Tool tool = tool_of(declared, at);
      for (const TurnFormat::Tool& other : out) {
        if (other.name == tool.name)
          refuse(at, fmt::format("there are two tools '{}'", replace_invalid_utf8(tool.name)));
      }
      out.push_back(std::move(tool));
      if (out.size() > kMostTools) refuse(where, fmt::format("at most {} tools", kMostTools));
    }
  };
  add(chat.options.tools, "tools");
  for (size_t i = 0; i < chat.messages.size(); ++i)
    add(chat.messages[i].tools, fmt::format("messages[{}].tools", i));
  return out;
}

// Only an assistant may have nothing to say: it calls tools.
void check_contents(const Json& messages, const std::vector<ChatMessage>& read) {
  for (size_t i = 0; i < read.size(); ++i) {
    const ChatMessage& m = read[i];
    const bool may_lack = m.role == ChatRole::kAssistant ? !m.tool_calls.empty() || !m.reasoning.empty()
                                                         : m.role == ChatRole::kSystem && !m.tools.empty();
    if (!may_lack && !find(messages[i], "content"))
      refuse(fmt::format("messages[{}].content", i), "is needed");
  }
}

}  // namespace

ChatRequest chat_request(const Json& request) {
  ChatRequest out;
  out.params = completion_params(request, /*chat=*/true);
  const Json* messages = find(request, "messages");
  if (!messages || !messages->is_array() || messages->empty())
    refuse("messages", "a list of messages is needed");
  check_message_keys(*messages);
  out.messages = client_error("messages", [&] { return messages_from_json(*messages); });
  check_contents(*messages, out.messages);
  for (size_t i = 0; i < out.messages.size(); ++i) {
    for (const ChatToolCall& call : out.messages[i].tool_calls)
      check_json_text(call.arguments, fmt::format("messages[{}].tool_calls", i));
  }
  out.options = client_error("tools", [&] { return chat_options_from_json(request); });
  declared_tools(out);  // or an error
  return out;
}

std::optional<TurnFormat> turn_format(const ChatRequest& chat) {
  const ChatOptions& o = chat.options;
  TurnFormat format;
  format.thinking = o.thinking;
  format.parallel_calls = o.parallel_calls;
  std::vector<TurnFormat::Tool> tools = declared_tools(chat);
  const bool forced = o.tool_choice == ToolChoice::kRequired;
  const bool usable = o.tool_choice != ToolChoice::kNone;
  if (forced && tools.empty()) refuse("tool_choice", "there are no tools");
  for (const std::string& name : o.tool_names) {
    if (std::none_of(tools.begin(), tools.end(), [&](const auto& tool) { return tool.name == name; }))
      refuse("tool_choice", fmt::format("there is no tool '{}'", replace_invalid_utf8(name)));
  }
  // Held to: a choice among the tools, or none of them.
  bool held = o.json_response || forced || !o.tool_names.empty() || (!usable && !tools.empty());
  for (TurnFormat::Tool& tool : tools) {
    const auto& names = o.tool_names;
    const bool chosen = names.empty() || std::find(names.begin(), names.end(), tool.name) != names.end();
    if (!usable || !chosen) continue;
    // Who is made to call a tool means its parameters, whether or not the tool says so.
    tool.strict = tool.strict || forced;
    held = held || tool.strict;
    format.tools.push_back(std::move(tool));
  }
  if (!held) return std::nullopt;
  for (const auto& [key, given] : {std::pair("min_tokens", chat.params.min_tokens > 0),
                                   std::pair("ignore_eos", chat.params.ignore_eos)}) {
    if (given)
      refuse(key, "does not go with an answer of a form (response_format, tool_choice, strict tools)");
  }
  if (o.json_response)
    format.response = o.response_schema.empty() ? ResponseForm::kJsonObject : ResponseForm::kJsonSchema;
  if (!o.response_schema.empty()) format.schema = Json::parse(o.response_schema);
  format.tool_use = forced ? ToolUse::kRequired : format.tools.empty() ? ToolUse::kNone : ToolUse::kAllowed;
  return format;
}

std::vector<int32_t> token_ids(const Json& list, const std::string& where, int64_t vocab_size) {
  std::vector<int32_t> ids;
  ids.reserve(list.size());
  for (const Json& id : list) {
    if (!id.is_number_integer()) refuse(where, "ids must be whole numbers");
    if (id < 0 || id >= vocab_size)
      refuse(where, fmt::format("there is no token id {}; the vocabulary has {}", id.dump(), vocab_size));
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

std::vector<std::vector<int32_t>> completion_prompts(const Json& request, const PromptReader& reader,
                                                     const PromptRules& rules) {
  const Json* prompt = find(request, "prompt");
  if (!prompt) refuse("prompt", "is needed");
  const auto ids = [&](const Json& list, const std::string& where) {
    if (list.empty()) refuse(where, "has no token");
    reader.check_count(static_cast<int64_t>(list.size()));
    return token_ids(list, where, rules.vocab_size);
  };
  const auto text = [&](const Json& item, const std::string& where) {
    if (item.get_ref<const std::string&>().empty()) refuse(where, "is empty");
    return reader.text(item.get_ref<const std::string&>());
  };
  if (prompt->is_string()) return {text(*prompt, "prompt")};
  if (!prompt->is_array() || prompt->empty())
    refuse("prompt", "must be a text, a list of texts, ids or a list of lists of ids");
  if (prompt->front().is_number()) return {ids(*prompt, "prompt")};
  if (prompt->size() > rules.most_prompts)
    refuse("prompt", fmt::format("at most {} prompts go here, got {}", rules.most_prompts, prompt->size()));
  std::vector<std::vector<int32_t>> out;
  for (const Json& item : *prompt) {
    const std::string where = fmt::format("prompt[{}]", out.size());
    if (!item.is_string() && !item.is_array()) refuse(where, "must be a text or a list of ids");
    out.push_back(item.is_string() ? text(item, where) : ids(item, where));
  }
  return out;
}

std::string StopScanner::push(std::string_view text) {
  if (stopped_) return {};
  held_ += text;
  size_t cut = std::string::npos, stop_size = 0;
  for (const std::string& stop : stops_) {
    const size_t at = held_.find(stop);
    if (at >= cut) continue;
    cut = at;
    stop_size = stop.size();
  }
  if (cut != std::string::npos) {
    stopped_ = true;
    held_.resize(keep_ ? cut + stop_size : cut);
    return std::exchange(held_, {});
  }
  // The longest end of the text that begins a stop string.
  size_t keep = 0;
  for (const std::string& stop : stops_) {
    for (size_t n = std::min(stop.size() - 1, held_.size()); n > keep; --n) {
      if (std::string_view(held_).substr(held_.size() - n) == std::string_view(stop).substr(0, n)) keep = n;
    }
  }
  std::string out = held_.substr(0, held_.size() - keep);
  held_.erase(0, out.size());
  return out;
}

std::string StopScanner::finish() {
  return stopped_ ? std::string() : std::exchange(held_, {});
}

Json usage_json(const Usage& u) {
  Json out = {{"prompt_tokens", u.prompt},
              {"completion_tokens", u.drawn},
              {"total_tokens", u.prompt + u.drawn},
              {"prompt_tokens_details", {{"cached_tokens", u.cached}}}};
  if (u.reasoning) out["completion_tokens_details"] = {{"reasoning_tokens", *u.reasoning}};
  return out;
}

namespace {

Json token_json(int32_t id, double logprob, const Tokenizer& tokenizer) {
  const std::vector<int32_t> ids = {id};
  const std::string bytes = tokenizer.decode(ids);
  Json list = Json::array();
  for (const char c : bytes) list.push_back(static_cast<unsigned char>(c));
  // JSON has no infinity.
  const double finite = std::isfinite(logprob) ? logprob : -9999.0;
  return {{"token", replace_invalid_utf8(bytes)}, {"logprob", finite}, {"bytes", list}};
}

}  // namespace

Json logprob_json(const DrawnToken& token, const Tokenizer& tokenizer) {
  Json out = token_json(token.id, token.logprob, tokenizer);
  Json top = Json::array();
  for (const auto& [id, logprob] : token.top) top.push_back(token_json(id, logprob, tokenizer));
  out["top_logprobs"] = top;
  return out;
}

}  // namespace godwit::serve
