// The answer to one API request while it is made: tokens in, JSON out. Its members are called on the engine's
// thread alone.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "godwit/infer/engine.h"
#include "godwit/serve/http.h"
#include "godwit/serve/metrics.h"
#include "godwit/serve/protocol.h"
#include "godwit/text/chat_parser.h"

namespace godwit::serve {

// What does not change while an answer is made.
struct AnswerHead {
  std::string id;
  std::string model;
  int64_t created = 0;  // seconds since the epoch
  std::chrono::steady_clock::time_point arrived = std::chrono::steady_clock::now();  // the request
  CompletionParams params;
  int64_t prompt_tokens = 0;  // of all prompts
  bool chat = true;
  bool thinking = true;
  int64_t choices = 1;  // of all prompts together
  // Set where a choice had to be brought to its end before its limit (GrammarConstraint); empty: none.
  std::vector<std::shared_ptr<std::atomic<bool>>> hurried = {};
  std::vector<std::string> echo = {};  // completions: what each prompt's answers begin with
};

class Answer {
 public:
  Answer(AnswerHead head, const Tokenizer& tokenizer, std::shared_ptr<HttpReply> reply, Metrics& metrics);
  ~Answer();

  // False when no more tokens are wanted: a stop string has come, or the client has gone.
  bool on_token(int64_t choice, const DrawnToken& token);
  void on_finish(int64_t choice, const Finish& finish);

 private:
  struct Choice;

  void begin();
  void show(int64_t index, const std::vector<ChatEvent>& events);
  void send_delta(int64_t index, Json delta, const Json& reason = nullptr);
  void send_event(Json event);
  void add_text(int64_t index, const ChatEvent& event);
  const std::string& echo_of(int64_t index) const;
  Json envelope(const char* object) const;
  Json take_logprobs(Choice& choice) const;
  Json whole_choice(int64_t index);
  void fail(const Finish& finish);
  void complete();

  AnswerHead head_;
  const Tokenizer& tokenizer_;
  std::shared_ptr<HttpReply> reply_;
  Metrics& metrics_;
  std::vector<std::unique_ptr<Choice>> choices_;
  int64_t open_ = 0;
  Usage usage_;        // of the choices that have ended
  int64_t drawn_ = 0;  // of all choices so far
  bool begun_ = false, over_ = false;
};

}  // namespace godwit::serve
