// OpenAI-style JSON: requests in, answers out. No HTTP and no engine here, so that it can be tested and
// fuzzed alone.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "godwit/infer/sampling.h"
#include "godwit/serve/api_error.h"
#include "godwit/serve/prompt.h"
#include "godwit/text/chat_format.h"
#include "godwit/text/turn_grammar.h"

namespace godwit::serve {

// What completions and chat completions share.
struct CompletionParams {
  SamplingParams sampling;
  std::optional<int64_t> max_tokens;
  int64_t choices = 1;
  bool stream = false;
  bool include_usage = false;
  bool continuous_usage = false;  // in every event of a stream, as far as it has come
  std::vector<std::string> stop;
  bool include_stop = false;      // the stop string that ended the text stays in it
  std::vector<int32_t> stop_ids;  // stop_token_ids
  int64_t min_tokens = 0;         // before these nothing ends the text
  bool ignore_eos = false;        // the model's own end is never drawn
  bool echo = false;              // a completion begins with its prompt
  bool logprobs = false;
  int64_t top_logprobs = 0;
};
// Throws ApiError 400 that names the key.
CompletionParams completion_params(const Json& request, bool chat);
// The same for ids of logit_bias and stop_token_ids beyond the vocabulary.
void check_ids(const CompletionParams& params, int64_t vocab_size);

struct ChatRequest {
  CompletionParams params;
  std::vector<ChatMessage> messages;
  ChatOptions options;
};
// The form that the turn must have; none if anything goes: no JSON is asked for, no tool has to be called or
// must not be, and no tool is strict. Throws ApiError 400.
std::optional<TurnFormat> turn_format(const ChatRequest& chat);
ChatRequest chat_request(const Json& request);

// A list of ids below `vocab_size`. `where` is its place in the request. Throws ApiError 400.
std::vector<int32_t> token_ids(const Json& list, const std::string& where, int64_t vocab_size);

// `prompt` of a completion: a text, texts, ids or lists of ids. Throws ApiError 400.
struct PromptRules {
  size_t most_prompts = 1;
  int64_t vocab_size = 0;
};
std::vector<std::vector<int32_t>> completion_prompts(const Json& request, const PromptReader& reader,
                                                     const PromptRules& rules);

// Text as it comes, cut before (with `keep`: behind) the first of the stop strings. What may still become one
// is held back.
class StopScanner {
 public:
  explicit StopScanner(std::vector<std::string> stops, bool keep = false)
      : stops_(std::move(stops)), keep_(keep) {}
  std::string push(std::string_view text);  // what can be shown now
  std::string finish();                     // what was held back, when no more comes
  bool stopped() const { return stopped_; }

 private:
  std::vector<std::string> stops_;
  bool keep_ = false;
  std::string held_;
  bool stopped_ = false;
};

struct Usage {
  int64_t prompt = 0, cached = 0, drawn = 0;
  std::optional<int64_t> reasoning = {};  // of those drawn; none: this is no chat
};
Json usage_json(const Usage& usage);

// One token of "logprobs": {"content": [...]}.
Json logprob_json(const DrawnToken& token, const Tokenizer& tokenizer);

}  // namespace godwit::serve
