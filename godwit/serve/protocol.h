// OpenAI-style JSON: requests in, answers out. No HTTP and no engine here, so that it can be tested and
// fuzzed alone.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "godwit/base/check.h"
#include "godwit/infer/sampling.h"
#include "godwit/text/chat_format.h"
#include "godwit/text/turn_grammar.h"

namespace godwit::serve {

using Json = nlohmann::ordered_json;

// A request that cannot be served; the message goes to the client.
class ApiError : public Error {
 public:
  ApiError(int status, const std::string& message, std::string param = {})
      : Error(message), status_(status), param_(std::move(param)) {}
  int status() const { return status_; }
  const std::string& param() const { return param_; }

 private:
  int status_;
  std::string param_;
};

// {"error": {"message", "type", "param", "code"}}
std::string error_body(int status, std::string_view message, const std::string& param = {});

// Valid UTF-8 whatever the strings hold.
std::string to_text(const Json& json);

// A JSON object. Throws ApiError 400 that says where it is not one.
Json parse_object(const std::string& body);

// What completions and chat completions share.
struct CompletionParams {
  SamplingParams sampling;
  std::optional<int64_t> max_tokens;
  int64_t choices = 1;
  bool stream = false;
  bool include_usage = false;
  std::vector<std::string> stop;
  std::vector<int32_t> stop_ids;  // stop_token_ids
  bool logprobs = false;
  int64_t top_logprobs = 0;
};
// Throws ApiError 400 that names the key.
CompletionParams completion_params(const Json& request, bool chat);

struct ChatRequest {
  CompletionParams params;
  std::vector<ChatMessage> messages;
  ChatOptions options;
};
// The form that the turn must have; none if anything goes: no JSON is asked for, no tool has to be called,
// and no tool is strict. Throws ApiError 400.
std::optional<TurnFormat> turn_format(const ChatRequest& chat);
ChatRequest chat_request(const Json& request);

// `prompt` of a completion: a text, texts, ids or lists of ids. Throws ApiError 400.
std::vector<std::vector<int32_t>> completion_prompts(const Json& request, const Tokenizer& tokenizer);

// Text as it comes, cut before the first of the stop strings. What may still become one is held back.
class StopScanner {
 public:
  explicit StopScanner(std::vector<std::string> stops) : stops_(std::move(stops)) {}
  std::string push(std::string_view text);  // what can be shown now
  std::string finish();                     // what was held back, when no more comes
  bool stopped() const { return stopped_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  bool stopped_ = false;
};

Json usage_json(int64_t prompt_tokens, int64_t cached_tokens, int64_t drawn_tokens);

// One token of "logprobs": {"content": [...]}.
Json logprob_json(const DrawnToken& token, const Tokenizer& tokenizer);

}  // namespace godwit::serve
