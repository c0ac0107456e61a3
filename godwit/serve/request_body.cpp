#include "godwit/serve/request_body.h"

#include <algorithm>
#include <initializer_list>
#include <vector>

#include "godwit/serve/prompt.h"
#include "godwit/text/utf8.h"

namespace godwit::serve {
namespace {

constexpr size_t kDeepest = 256;
// An ordered object finds a key by looking at every one before it: the time to build it is quadratic.
constexpr size_t kMostKeys = 4096;
constexpr size_t kMostKeyLooks = size_t{1} << 24;  // in all objects of a body
constexpr size_t kMostValues = size_t{1}
                               << 23;  // an object or a list counts as eight: memory is taken for it
constexpr size_t kShownKey = 64;       // bytes of a key that a message repeats

std::string shown(std::string_view key) {
  return replace_invalid_utf8(key.size() <= kShownKey ? key : key.substr(0, kShownKey)) +
         (key.size() <= kShownKey ? "" : "...");
}

// Refuses what would take too long to build or to walk. A pass of its own: the parser's callback has the
// parser look at all of a list again after each object in it. What is no JSON is left to the parser.
class BodyLimits final : public nlohmann::json_sax<Json> {
 public:
  BodyLimits(bool keys_once, std::string param, std::function<bool()> gone = {})
      : keys_once_(keys_once), param_(std::move(param)), gone_(std::move(gone)) {}
  void check(const std::string& text) {
    open_.clear();
    Json::sax_parse(text, this);
  }

  bool null() override { return count(1); }
  bool boolean(bool) override { return count(1); }
  bool number_integer(number_integer_t) override { return count(1); }
  bool number_unsigned(number_unsigned_t) override { return count(1); }
  bool number_float(number_float_t, const string_t&) override { return count(1); }
  bool string(string_t&) override { return count(2); }
  bool binary(binary_t&) override { return count(2); }
  bool start_object(size_t) override { return open(); }
  bool start_array(size_t) override { return open(); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& key) override {
    std::vector<string_t>& keys = open_.back();
    if (open_.size() == 1 && keys_once_) param_ = shown(key);
    looks_ += keys.size();
    if (looks_ > kMostKeyLooks) throw ApiError(400, "the JSON holds too many large objects", param_);
    if (keys.size() >= kMostKeys)
      throw ApiError(400, fmt::format("the JSON holds an object of more than {} keys", kMostKeys), param_);
    if (keys_once_ && std::find(keys.begin(), keys.end(), key) != keys.end())
      throw ApiError(400, fmt::format("the JSON holds an object with the key '{}' twice", shown(key)),
                     param_);
    keys.push_back(key);
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception&) override { return false; }

 private:
  bool open() {
    if (open_.size() > kDeepest)
      throw ApiError(400, fmt::format("the JSON is nested deeper than {}", kDeepest), param_);
    open_.emplace_back();
    return count(8);
  }
  bool count(size_t values) {
    if (gone_ && values_ / kAsked != (values_ + values) / kAsked && gone_()) throw ClientGone();
    values_ += values;
    if (values_ > kMostValues) throw ApiError(400, "the JSON holds too many values", param_);
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  static constexpr size_t kAsked = size_t{1} << 16;  // values between two looks at the client

  bool keys_once_;
  std::string param_;                        // the key of the request that is being read
  std::vector<std::vector<string_t>> open_;  // keys so far of each object and list that is open
  std::function<bool()> gone_;
  size_t looks_ = 0, values_ = 0;
};

}  // namespace

Json parse_object(const std::string& body, const std::function<bool()>& gone) {
  // The library takes a zero byte for the end of the text, whatever follows.
  if (body.find('\0') != std::string::npos) throw ApiError(400, "the body is no JSON: it holds a zero byte");
  Json out;
  try {
    BodyLimits(/*keys_once=*/true, "", gone).check(body);
    if (gone && gone()) throw ClientGone();
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

void check_json_text(const std::string& text, const std::string& param) {
  BodyLimits(/*keys_once=*/false, param).check(text);
}

namespace {

constexpr unsigned kChat = 1, kText = 2, kBoth = kChat | kText;

// A key that is passed on to nobody: its value means nothing here, or only one value does not change the
// answer, or none.
struct Rule {
  const char* key;
  unsigned calls;
  enum class Takes { kRead, kAnything, kOnly, kNothing } takes;
  const char* value = "";  // kOnly: as JSON
  const char* advice = "not supported";
};

using Takes = Rule::Takes;

const std::vector<Rule>& rules() {
  static constexpr const char* kForm = "not supported; response_format asks for an answer of a form";
  static constexpr const char* kTools = "no longer part of this API; use tools and tool_choice";
  static const std::vector<Rule> all = {
      {"model", kBoth, Takes::kRead},
      {"messages", kChat, Takes::kRead},
      {"prompt", kText, Takes::kRead},
      {"echo", kText, Takes::kRead},
      {"best_of", kText, Takes::kRead},
      {"tools", kChat, Takes::kRead},
      {"tool_choice", kChat, Takes::kRead},
      {"parallel_tool_calls", kChat, Takes::kRead},
      {"response_format", kChat, Takes::kRead},
      {"thinking", kChat, Takes::kRead},
      {"thinking_effort", kChat, Takes::kRead},
      {"reasoning_effort", kChat, Takes::kRead},
      {"chat_template_kwargs", kChat, Takes::kRead},
      {"max_completion_tokens", kChat, Takes::kRead},
      {"top_logprobs", kChat, Takes::kRead},
      {"temperature", kBoth, Takes::kRead},
      {"top_p", kBoth, Takes::kRead},
      {"top_k", kBoth, Takes::kRead},
      {"min_p", kBoth, Takes::kRead},
      {"presence_penalty", kBoth, Takes::kRead},
      {"frequency_penalty", kBoth, Takes::kRead},
      {"repetition_penalty", kBoth, Takes::kRead},
      {"logit_bias", kBoth, Takes::kRead},
      {"logprobs", kBoth, Takes::kRead},
      {"seed", kBoth, Takes::kRead},
      {"n", kBoth, Takes::kRead},
      {"max_tokens", kBoth, Takes::kRead},
      {"min_tokens", kBoth, Takes::kRead},
      {"ignore_eos", kBoth, Takes::kRead},
      {"stop", kBoth, Takes::kRead},
      {"stop_token_ids", kBoth, Takes::kRead},
      {"include_stop_str_in_output", kBoth, Takes::kRead},
      {"stream", kBoth, Takes::kRead},
      {"stream_options", kBoth, Takes::kRead},
      // Of no meaning here.
      {"user", kBoth, Takes::kAnything},
      {"metadata", kBoth, Takes::kAnything},
      {"store", kBoth, Takes::kAnything},
      {"service_tier", kBoth, Takes::kAnything},
      {"safety_identifier", kBoth, Takes::kAnything},
      {"prompt_cache_key", kBoth, Takes::kAnything},
      {"prompt_cache_retention", kBoth, Takes::kAnything},
      {"prediction", kBoth, Takes::kAnything},
      {"request_id", kBoth, Takes::kAnything},
      {"add_special_tokens", kBoth, Takes::kAnything},  // the format's own are there, text gets none
      {"spaces_between_special_tokens", kBoth, Takes::kAnything},
      // One value changes nothing.
      {"echo", kChat, Takes::kOnly, "false"},
      {"suffix", kText, Takes::kOnly, R"("")"},
      {"modalities", kChat, Takes::kOnly, R"(["text"])"},
      {"verbosity", kChat, Takes::kOnly, R"("medium")"},
      {"add_generation_prompt", kChat, Takes::kOnly, "true"},
      {"continue_final_message", kChat, Takes::kOnly, "false"},
      {"include_reasoning", kChat, Takes::kOnly, "true"},
      {"separate_reasoning", kChat, Takes::kOnly, "true"},
      {"skip_special_tokens", kBoth, Takes::kOnly, "true"},
      {"use_beam_search", kBoth, Takes::kOnly, "false"},
      {"length_penalty", kBoth, Takes::kOnly, "1.0"},
      {"early_stopping", kBoth, Takes::kOnly, "false"},
      {"priority", kBoth, Takes::kOnly, "0"},
      {"bad_words", kBoth, Takes::kOnly, "[]"},
      {"return_tokens_as_token_ids", kBoth, Takes::kOnly, "false"},
      {"return_token_ids", kBoth, Takes::kOnly, "false"},
      // Known elsewhere, and better said to be so than called unknown.
      {"functions", kChat, Takes::kNothing, "", kTools},
      {"function_call", kChat, Takes::kNothing, "", kTools},
      {"audio", kChat, Takes::kNothing},
      {"web_search_options", kChat, Takes::kNothing},
      {"chat_template", kChat, Takes::kNothing, "", "not supported; the chat format is the model's own"},
      {"documents", kChat, Takes::kNothing},
      {"mm_processor_kwargs", kChat, Takes::kNothing},
      {"response_format", kText, Takes::kNothing, "", "not supported here; /v1/chat/completions has it"},
      {"guided_json", kBoth, Takes::kNothing, "", kForm},
      {"guided_regex", kBoth, Takes::kNothing, "", kForm},
      {"guided_choice", kBoth, Takes::kNothing, "", kForm},
      {"guided_grammar", kBoth, Takes::kNothing, "", kForm},
      {"structured_outputs", kBoth, Takes::kNothing, "", kForm},
      {"prompt_logprobs", kBoth, Takes::kNothing},
      {"truncate_prompt_tokens", kBoth, Takes::kNothing},
      {"allowed_token_ids", kBoth, Takes::kNothing, "", "not supported; logit_bias takes tokens out"},
      {"logits_processors", kBoth, Takes::kNothing},
      {"cache_salt", kBoth, Takes::kNothing},
  };
  return all;
}

void apply(const Rule& rule, const Json& value) {
  if (value.is_null() || rule.takes == Takes::kRead || rule.takes == Takes::kAnything) return;
  if (rule.takes == Takes::kOnly) {
    if (value == Json::parse(rule.value)) return;
    throw ApiError(400, fmt::format("{}: only {} is supported", rule.key, rule.value), rule.key);
  }
  throw ApiError(400, fmt::format("{}: {}", rule.key, rule.advice), rule.key);
}

[[noreturn]] void refuse_unknown(const std::string& key, const std::string& where) {
  const std::string path = where + shown(key);
  throw ApiError(400, fmt::format("Unrecognized request argument supplied: {}", path), path);
}

bool is_one_of(const std::string& key, std::initializer_list<const char*> keys) {
  return std::any_of(keys.begin(), keys.end(), [&](const char* k) { return key == k; });
}

}  // namespace

void check_keys(const Json& request, Call call) {
  for (const auto& [name, value] : request.items()) {
    const std::string& key = name;
    if (call == Call::kDetokenize) {
      if (!is_one_of(key, {"model", "tokens"})) refuse_unknown(key, "");
      continue;
    }
    if (call == Call::kTokenize && is_one_of(key, {"prompt", "return_token_strs"})) continue;
    const unsigned mine = call == Call::kCompletion ? kText : kChat;
    const auto rule = std::find_if(rules().begin(), rules().end(),
                                   [&](const Rule& r) { return (r.calls & mine) != 0 && key == r.key; });
    if (rule == rules().end()) refuse_unknown(key, "");
    apply(*rule, value);
  }
}

namespace {

void check_object(const Json& object, const std::string& where, std::initializer_list<const char*> keys) {
  if (!object.is_object()) return;  // said by whoever reads it
  for (const auto& [key, value] : object.items()) {
    if (!is_one_of(key, keys)) refuse_unknown(key, where + ".");
  }
}

// The parts of a content. `cache_control` is a word of other servers for what the prefix cache does unasked.
void check_parts(const Json& content, const std::string& where) {
  if (!content.is_array()) return;
  for (size_t i = 0; i < content.size(); ++i) {
    const std::string at = fmt::format("{}[{}]", where, i);
    const bool text = content[i].is_object() && content[i].value("type", Json()) == "text";
    check_object(content[i], at, {"type", text ? "text" : "image_url", "cache_control"});
    if (!text && content[i].is_object() && content[i].contains("image_url"))
      check_object(content[i]["image_url"], at + ".image_url", {"url", "detail"});
  }
}

// A key that a message has, though not one of its role.
bool fits_role(const std::string& key, const Json& role) {
  if (is_one_of(key, {"tool_calls", "reasoning_content", "reasoning"})) return role == "assistant";
  if (is_one_of(key, {"tool_call_id", "tool"})) return role == "tool";
  if (key == "tools") return role == "system" || role == "developer";
  return true;
}

void check_message(const Json& message, const std::string& where) {
  const Json role = message.value("role", Json());
  for (const auto& [name, value] : message.items()) {
    const std::string& key = name;
    const std::string at = where + "." + key;
    const bool empty = value.is_null() || ((value.is_array() || value.is_string()) && value.empty());
    if (is_one_of(key, {"role", "content", "name", "tool", "tools", "tool_calls", "tool_call_id",
                        "reasoning_content", "reasoning", "weight"})) {
      if (!empty && !fits_role(key, role))
        throw ApiError(400, fmt::format("{}: does not go with this role", at), at);
      continue;
    }
    // What the openai client adds to an answer that goes back as a message.
    if (!is_one_of(key, {"refusal", "annotations", "audio", "function_call"}))
      refuse_unknown(key, where + ".");
    if (!empty) throw ApiError(400, fmt::format("{}: not supported", at), at);
  }
  if (message.contains("content")) check_parts(message["content"], where + ".content");
  const auto calls = message.find("tool_calls");
  if (calls == message.end() || !calls->is_array()) return;
  for (size_t i = 0; i < calls->size(); ++i) {
    const std::string at = fmt::format("{}.tool_calls[{}]", where, i);
    const Json& call = (*calls)[i];
    check_object(call, at, {"id", "type", "index", "function", "name", "arguments"});
    if (call.is_object() && call.contains("function"))
      check_object(call["function"], at + ".function", {"name", "arguments"});
  }
}

}  // namespace

void check_message_keys(const Json& messages) {
  if (!messages.is_array()) return;
  for (size_t i = 0; i < messages.size(); ++i) {
    if (messages[i].is_object()) check_message(messages[i], fmt::format("messages[{}]", i));
  }
}

}  // namespace godwit::serve
