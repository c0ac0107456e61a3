#include "godwit/serve/answer.h"

#include <optional>
#include <utility>

#include "godwit/text/stream_decoder.h"
#include "godwit/text/utf8.h"

namespace godwit::serve {
namespace {

// "Not now", or a fault.
int status_of(const Finish& finish) {
  return finish.reason == FinishReason::kNoRoom ? 503 : 500;
}

// Where tokens begin in the text that their bytes become, in characters. What ends in the middle of a
// character and is not gone on with is U+FFFD.
class TextOffsets {
 public:
  // Of the next token.
  int64_t next(const std::string& bytes) {
    const std::string text = rest_ + bytes;
    std::optional<int64_t> begin;
    size_t pos = 0;
    while (pos < text.size()) {
      const Utf8Char c = decode_utf8(text, pos);
      if (!begin && pos + c.length > rest_.size()) begin = characters_;
      if (c.truncated) break;
      ++characters_;
      pos += c.length;
    }
    rest_ = text.substr(pos);
    return begin.value_or(characters_);
  }

 private:
  int64_t characters_ = 0;  // complete
  std::string rest_;        // of a character, at most 3 bytes
};

}  // namespace

struct Answer::Choice {
  Choice(const Tokenizer& tokenizer, const AnswerHead& head)
      : decoder(tokenizer, /*skip_specials=*/true), stops(head.params.stop, head.params.include_stop) {
    if (head.chat) parser = std::make_unique<ChatParser>(tokenizer, head.thinking);
  }
  StreamDecoder decoder;               // completions
  std::unique_ptr<ChatParser> parser;  // chats
  StopScanner stops;
  ChatMessage message;  // content, reasoning and calls so far
  std::vector<Json> logprobs;
  TextOffsets offsets;  // completions with logprobs
  int64_t drawn = 0;
  std::string reason;
  std::chrono::steady_clock::time_point last = {};
  bool any = false;
};

Answer::Answer(AnswerHead head, const Tokenizer& tokenizer, std::shared_ptr<HttpReply> reply,
               Metrics& metrics)
    : head_(std::move(head)), tokenizer_(tokenizer), reply_(std::move(reply)), metrics_(metrics) {
  for (int64_t i = 0; i < head_.choices; ++i) choices_.push_back(std::make_unique<Choice>(tokenizer_, head_));
  open_ = head_.choices;
  if (head_.chat) usage_.reasoning = 0;
}

Answer::~Answer() = default;

Json Answer::envelope(const char* object) const {
  return {{"id", head_.id}, {"object", object}, {"created", head_.created}, {"model", head_.model}};
}

const std::string& Answer::echo_of(int64_t index) const {
  static const std::string none;
  return head_.echo.empty() ? none : head_.echo[index / head_.params.choices];
}

void Answer::send_event(Json event) {
  // Where usage is asked for, every event has the key and the last one the value.
  const bool final = event.contains("usage");
  if (head_.params.include_usage && !final) event["usage"] = nullptr;
  if (head_.params.continuous_usage && !final)
    event["usage"] =
        usage_json({.prompt = head_.prompt_tokens, .drawn = drawn_, .reasoning = usage_.reasoning});
  over_ = !reply_->write("data: " + to_text(event) + "\n\n") || over_;
}

void Answer::begin() {
  if (begun_ || !head_.params.stream) return;
  begun_ = true;
  reply_->begin({.content_type = "text/event-stream",
                 .headers = {{"cache-control", "no-cache"}, {"x-accel-buffering", "no"}}});
  for (int64_t i = 0; i < head_.choices; ++i) {
    if (head_.chat) send_delta(i, {{"role", "assistant"}, {"content", ""}});
    if (!echo_of(i).empty()) send_delta(i, {{"content", echo_of(i)}});
  }
}

Json Answer::take_logprobs(Choice& choice) const {
  if (!head_.params.logprobs) return nullptr;
  Json list = Json::array();
  for (Json& entry : choice.logprobs) list.push_back(std::move(entry));
  choice.logprobs.clear();
  if (head_.chat) return {{"content", list}};
  Json tokens = Json::array(), values = Json::array(), top = Json::array(), offsets = Json::array();
  for (const Json& entry : list) {
    std::string bytes;
    for (const Json& byte : entry["bytes"]) bytes += static_cast<char>(byte.get<int>());
    offsets.push_back(choice.offsets.next(bytes));
    tokens.push_back(entry["token"]);
    values.push_back(entry["logprob"]);
    Json alternatives = Json::object();
    for (const Json& other : entry["top_logprobs"])
      alternatives[other["token"].get<std::string>()] = other["logprob"];
    top.push_back(alternatives);
  }
  return {{"tokens", tokens}, {"token_logprobs", values}, {"top_logprobs", top}, {"text_offset", offsets}};
}

void Answer::send_delta(int64_t index, Json delta, const Json& reason) {
  Json event = envelope(head_.chat ? "chat.completion.chunk" : "text_completion");
  Json choice = {{"index", index}};
  if (head_.chat) {
    choice["delta"] = std::move(delta);
  } else {
    choice["text"] = delta.value("content", "");
  }
  // The last event has those of tokens without text of their own, if there are any.
  const bool none = !reason.is_null() && choices_[index]->logprobs.empty();
  choice["logprobs"] = none ? Json(nullptr) : take_logprobs(*choices_[index]);
  choice["finish_reason"] = reason;
  event["choices"] = Json::array({std::move(choice)});
  send_event(event);
}

// Events of a chat, or text of a completion as one content event.
void Answer::show(int64_t index, const std::vector<ChatEvent>& events) {
  Choice& c = *choices_[index];
  for (const ChatEvent& event : events) {
    ChatEvent shown = event;
    if (event.kind == ChatEvent::Kind::kContent && c.drawn >= head_.params.min_tokens) {
      shown.text = c.stops.push(event.text);
      if (shown.text.empty()) continue;
    }
    add_text(index, shown);
  }
}

void Answer::add_text(int64_t index, const ChatEvent& shown) {
  Choice& c = *choices_[index];
  add_event(shown, c.message);
  if (!head_.params.stream) return;
  Json delta;
  switch (shown.kind) {
    case ChatEvent::Kind::kReasoning:
      delta = {{"reasoning_content", shown.text}};
      break;
    case ChatEvent::Kind::kContent:
      delta = {{"content", shown.text}};
      break;
    case ChatEvent::Kind::kCallBegin: {
      ChatToolCall& call = c.message.tool_calls.back();
      call.id = fmt::format("call_{}_{}_{}", head_.id, index, shown.call);
      delta = {{"tool_calls", Json::array({{{"index", shown.call},
                                            {"id", call.id},
                                            {"type", "function"},
                                            {"function", {{"name", call.name}, {"arguments", ""}}}}})}};
      break;
    }
    case ChatEvent::Kind::kCallArguments:
      delta = {
          {"tool_calls", Json::array({{{"index", shown.call}, {"function", {{"arguments", shown.text}}}}})}};
      break;
    case ChatEvent::Kind::kCallEnd:
      return;
  }
  send_delta(index, std::move(delta));
}

bool Answer::on_token(int64_t index, const DrawnToken& token) {
  Choice& c = *choices_[index];
  const auto now = std::chrono::steady_clock::now();
  const auto seconds = [](auto span) { return std::chrono::duration<double>(span).count(); };
  if (c.any) {
    metrics_.between_tokens.add(seconds(now - c.last));
  } else {
    metrics_.first_token.add(seconds(now - head_.arrived));
  }
  metrics_.tokens.add(now);
  c.any = true;
  c.last = now;
  ++c.drawn;
  ++drawn_;
  if (over_) return false;
  begin();
  if (head_.params.logprobs && !tokenizer_.is_special(token.id))
    c.logprobs.push_back(logprob_json(token, tokenizer_));
  std::vector<ChatEvent> events;
  if (c.parser) {
    *usage_.reasoning += c.parser->in_thought() ? 1 : 0;
    c.parser->push(token.id, events);
  } else if (std::string text = c.decoder.push(token.id); !text.empty()) {
    events.push_back({.kind = ChatEvent::Kind::kContent, .text = std::move(text)});
  }
  show(index, events);
  return !over_ && !c.stops.stopped();
}

void Answer::on_finish(int64_t index, const Finish& finish) {
  Choice& c = *choices_[index];
  --open_;
  if (index % head_.params.choices == 0) {  // the first of its prompt
    usage_.prompt += finish.prompt_tokens;
    usage_.cached += finish.cached_tokens;
  }
  usage_.drawn += finish.drawn_tokens + (finish.reason == FinishReason::kStop ? 1 : 0);
  if (over_) return;
  if (failed(finish.reason)) return fail(finish);
  begin();
  if (!c.stops.stopped()) {
    std::vector<ChatEvent> events;
    if (c.parser) {
      c.parser->finish(events);
    } else if (std::string text = c.decoder.finish(); !text.empty()) {
      events.push_back({.kind = ChatEvent::Kind::kContent, .text = std::move(text)});
    }
    show(index, events);
    if (std::string held = c.stops.finish(); !held.empty()) {
      add_text(index, {.kind = ChatEvent::Kind::kContent, .text = std::move(held)});
    }
  }
  const bool hurried = !head_.hurried.empty() && *head_.hurried[index];
  if (finish.reason == FinishReason::kLength || hurried) {
    c.reason = "length";
  } else {
    c.reason = c.message.tool_calls.empty() ? "stop" : "tool_calls";
  }
  if (head_.params.stream) send_delta(index, Json::object(), c.reason);
  if (open_ == 0) complete();
}

Json Answer::whole_choice(int64_t index) {
  Choice& c = *choices_[index];
  std::string content;
  for (const ChatPart& part : c.message.content) content += part.text;
  Json out = {{"index", index}};
  if (head_.chat) {
    Json message = {{"role", "assistant"}};
    message["content"] = content.empty() && !c.message.tool_calls.empty() ? Json(nullptr) : Json(content);
    if (!c.message.reasoning.empty()) message["reasoning_content"] = c.message.reasoning;
    if (!c.message.tool_calls.empty()) {
      Json calls = Json::array();
      for (size_t i = 0; i < c.message.tool_calls.size(); ++i) {
        const ChatToolCall& call = c.message.tool_calls[i];
        calls.push_back({{"id", fmt::format("call_{}_{}_{}", head_.id, index, i)},
                         {"type", "function"},
                         {"function", {{"name", call.name}, {"arguments", call.arguments}}}});
      }
      message["tool_calls"] = std::move(calls);
    }
    out["message"] = std::move(message);
  } else {
    out["text"] = echo_of(index) + content;
  }
  out["logprobs"] = take_logprobs(c);
  out["finish_reason"] = c.reason;
  return out;
}

void Answer::fail(const Finish& finish) {
  over_ = true;
  const std::string body = error_body(status_of(finish), finish.error);
  if (begun_) {
    reply_->write("data: " + body + "\n\n");
    reply_->end();
  } else {
    HttpResponse response{.status = status_of(finish), .body = body};
    if (response.status == 503) response.headers = {{"retry-after", "1"}};
    reply_->send(std::move(response));
  }
}

void Answer::complete() {
  over_ = true;
  const Json usage = usage_json(usage_);
  if (head_.params.stream) {
    if (head_.params.include_usage) {
      Json event = envelope(head_.chat ? "chat.completion.chunk" : "text_completion");
      event["choices"] = Json::array();
      event["usage"] = usage;
      send_event(event);
    }
    reply_->write("data: [DONE]\n\n");
    reply_->end();
    return;
  }
  Json body = envelope(head_.chat ? "chat.completion" : "text_completion");
  Json choices = Json::array();
  for (int64_t i = 0; i < head_.choices; ++i) choices.push_back(whole_choice(i));
  body["choices"] = std::move(choices);
  body["usage"] = usage;
  reply_->send({.body = to_text(body)});
}

}  // namespace godwit::serve
