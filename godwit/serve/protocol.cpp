#include "godwit/serve/protocol.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <utility>

#include "godwit/text/chat_json.h"
#include "godwit/text/utf8.h"

namespace godwit::serve {
namespace {

constexpr size_t kMostStops = 16;
constexpr size_t kMostStopIds = 64;
constexpr size_t kDeepest = 256;
// An ordered object finds a key by looking at every one before it: the time to build it is quadratic.
constexpr size_t kMostKeys = 4096;
constexpr size_t kMostKeyLooks = size_t{1} << 24;  // in all objects of a body

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
  return value->get<int64_t>();
}

bool flag(const Json& request, const char* key, bool fallback) {
  const Json* value = find(request, key);
  if (!value) return fallback;
  if (!value->is_boolean()) refuse(key, "must be true or false");
  return value->get<bool>();
}

std::vector<std::string> stop_strings(const Json& request) {
  const Json* value = find(request, "stop");
  std::vector<std::string> out;
  if (!value) return out;
  const Json list = value->is_string() ? Json::array({*value}) : *value;
  if (!list.is_array()) refuse("stop", "must be a text or a list of texts");
  for (const Json& item : list) {
    if (!item.is_string() || item.get_ref<const std::string&>().empty())
      refuse("stop", "must hold texts that are not empty");
    out.push_back(item.get<std::string>());
  }
  if (out.size() > kMostStops)
    refuse("stop", fmt::format("at most {} texts, got {}", kMostStops, out.size()));
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

std::vector<int32_t> ids_of(const Json& list) {
  std::vector<int32_t> ids;
  for (const Json& id : list) {
    if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() > INT32_MAX)
      refuse("prompt", "ids must be whole numbers from 0");
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

uint64_t random_seed() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

// Errors of the chat format are the client's.
template <class F>
auto client_error(const char* key, F&& action) {
  try {
    return action();
  } catch (const ApiError&) {
    throw;
  } catch (const std::exception& e) {
    throw ApiError(400, e.what(), key);
  }
}

// Refuses what would take too long to build or to walk. A pass of its own: the parser's callback has the
// parser look at all of a list again after each object in it. What is no JSON is left to the parser.
class BodyLimits final : public nlohmann::json_sax<Json> {
 public:
  void check(const std::string& text) {
    keys_.clear();
    Json::sax_parse(text, this);
  }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return open(); }
  bool start_array(size_t) override { return open(); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t&) override {
    looks_ += keys_.back();
    if (++keys_.back() > kMostKeys)
      throw ApiError(400, fmt::format("the JSON holds an object of more than {} keys", kMostKeys));
    if (looks_ > kMostKeyLooks) throw ApiError(400, "the JSON holds too many large objects");
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception&) override { return false; }

 private:
  bool open() {
    if (keys_.size() > kDeepest)
      throw ApiError(400, fmt::format("the JSON is nested deeper than {}", kDeepest));
    keys_.push_back(0);
    return true;
  }
  bool close() {
    keys_.pop_back();
    return true;
  }

  std::vector<size_t> keys_;  // of each object and list that is open
  size_t looks_ = 0;
};

}  // namespace

std::string to_text(const Json& json) {
  return json.dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

std::string error_body(int status, std::string_view message, const std::string& param) {
  const char* type = status == 401   ? "authentication_error"
                     : status == 404 ? "not_found_error"
                     : status == 429 ? "rate_limit_error"
                     : status < 500  ? "invalid_request_error"
                                     : "server_error";
  return to_text({{"error",
                   {{"message", message},
                    {"type", type},
                    {"param", param.empty() ? Json(nullptr) : Json(param)},
                    {"code", nullptr}}}});
}

Json parse_object(const std::string& body) {
  // The library takes a zero byte for the end of the text, whatever follows.
  if (body.find('\0') != std::string::npos) throw ApiError(400, "the body is no JSON: it holds a zero byte");
  Json out;
  try {
    BodyLimits().check(body);
    out = Json::parse(body);
  } catch (const nlohmann::json::exception& e) {
    std::string_view what = e.what();  // begins with the library's own number, "[json.exception...] "
    if (const size_t end = what.find("] "); what.starts_with('[') && end != what.npos)
      what.remove_prefix(end + 2);
    throw ApiError(400, fmt::format("the body is no JSON: {}", replace_invalid_utf8(what)));
  }
  if (!out.is_object()) throw ApiError(400, "the body must be a JSON object");
  return out;
}

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
    if (!seed->is_number_integer()) refuse("seed", "must be a whole number");
    s.seed = seed->get<uint64_t>();
  } else {
    s.seed = random_seed();
  }
  const char* limit = chat && find(request, "max_completion_tokens") ? "max_completion_tokens" : "max_tokens";
  if (find(request, limit)) p.max_tokens = integer(request, limit, 0, 1, int64_t{1} << 31);
  p.choices = integer(request, "n", 1, 1, 128);
  p.stream = flag(request, "stream", false);
  if (const Json* options = find(request, "stream_options")) {
    if (!options->is_object()) refuse("stream_options", "must be an object");
    if (!p.stream) refuse("stream_options", "goes with stream: true");
    p.include_usage = flag(*options, "include_usage", false);
  }
  p.stop = stop_strings(request);
  p.stop_ids = stop_token_ids(request);
  if (chat) {
    p.logprobs = flag(request, "logprobs", false);
    p.top_logprobs = integer(request, "top_logprobs", 0, 0, 20);
    if (p.top_logprobs > 0 && !p.logprobs) refuse("top_logprobs", "goes with logprobs: true");
  } else if (find(request, "logprobs")) {
    p.logprobs = true;
    p.top_logprobs = integer(request, "logprobs", 0, 0, 20);
  }
  return p;
}

ChatRequest chat_request(const Json& request) {
  ChatRequest out;
  out.params = completion_params(request, /*chat=*/true);
  const Json* messages = find(request, "messages");
  if (!messages || !messages->is_array() || messages->empty())
    refuse("messages", "a list of messages is needed");
  out.messages = client_error("messages", [&] { return messages_from_json(*messages); });
  BodyLimits limits;  // arguments are JSON in a text, which the template parses
  for (const ChatMessage& message : out.messages) {
    for (const ChatToolCall& call : message.tool_calls) limits.check(call.arguments);
  }
  out.options = client_error("tools", [&] { return chat_options_from_json(request); });
  return out;
}

namespace {

// A declared tool, as the grammar takes it. OpenAI's form, or the function alone.
TurnFormat::Tool tool_of(const Json& declared) {
  const Json& function =
      declared.is_object() && declared.contains("function") ? declared["function"] : declared;
  if (!function.is_object()) refuse("tools", "each must be an object");
  const Json* name = find(function, "name");
  if (!name || !name->is_string() || name->get_ref<const std::string&>().empty())
    refuse("tools", "each needs a name");
  const Json* parameters = find(function, "parameters");
  return {.name = name->get<std::string>(),
          .parameters = parameters ? *parameters : Json(nullptr),
          .strict = flag(function, "strict", false)};
}

}  // namespace

std::optional<TurnFormat> turn_format(const ChatRequest& chat) {
  const ChatOptions& o = chat.options;
  TurnFormat format;
  format.thinking = o.thinking;
  format.parallel_calls = o.parallel_calls;
  std::vector<Json> lists;
  if (!o.tools.empty()) lists.push_back(Json::parse(o.tools));
  for (const ChatMessage& message : chat.messages) {
    if (!message.tools.empty()) lists.push_back(Json::parse(message.tools));
  }
  const bool forced = o.tool_choice == ToolChoice::kRequired;
  const bool usable = o.tool_choice != ToolChoice::kNone;
  bool strict = false;
  for (const Json& list : lists) {
    for (const Json& declared : list) {
      if (!usable) break;
      TurnFormat::Tool tool = tool_of(declared);
      if (!o.tool_name.empty() && tool.name != o.tool_name) continue;
      // Who is made to call a tool means its parameters, whether or not the tool says so.
      tool.strict = tool.strict || forced;
      strict = strict || tool.strict;
      format.tools.push_back(std::move(tool));
    }
  }
  if (forced && format.tools.empty()) {
    refuse("tool_choice", o.tool_name.empty()
                              ? "there are no tools"
                              : fmt::format("there is no tool '{}'", replace_invalid_utf8(o.tool_name)));
  }
  if (!o.json_response && !strict) return std::nullopt;
  if (o.json_response)
    format.response = o.response_schema.empty() ? ResponseForm::kJsonObject : ResponseForm::kJsonSchema;
  if (!o.response_schema.empty()) format.schema = Json::parse(o.response_schema);
  format.tool_use = forced ? ToolUse::kRequired : format.tools.empty() ? ToolUse::kNone : ToolUse::kAllowed;
  return format;
}

std::vector<std::vector<int32_t>> completion_prompts(const Json& request, const Tokenizer& tokenizer) {
  const Json* prompt = find(request, "prompt");
  if (!prompt) refuse("prompt", "is needed");
  if (prompt->is_string()) return {tokenizer.encode(prompt->get<std::string>())};
  if (!prompt->is_array() || prompt->empty())
    refuse("prompt", "must be a text, a list of texts, ids or a list of lists of ids");
  if (prompt->front().is_number()) return {ids_of(*prompt)};
  std::vector<std::vector<int32_t>> out;
  for (const Json& item : *prompt) {
    if (item.is_string()) {
      out.push_back(tokenizer.encode(item.get<std::string>()));
    } else if (item.is_array()) {
      out.push_back(ids_of(item));
    } else {
      refuse("prompt", "must hold texts or lists of ids");
    }
  }
  return out;
}

std::string StopScanner::push(std::string_view text) {
  if (stopped_) return {};
  held_ += text;
  size_t cut = std::string::npos;
  for (const std::string& stop : stops_) cut = std::min(cut, held_.find(stop));
  if (cut != std::string::npos) {
    stopped_ = true;
    held_.resize(cut);
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

Json usage_json(int64_t prompt_tokens, int64_t cached_tokens, int64_t drawn_tokens) {
  return {{"prompt_tokens", prompt_tokens},
          {"completion_tokens", drawn_tokens},
          {"total_tokens", prompt_tokens + drawn_tokens},
          {"prompt_tokens_details", {{"cached_tokens", cached_tokens}}}};
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
