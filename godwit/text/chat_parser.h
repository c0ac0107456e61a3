// K3's chat format (chat_format.h), ids to message: reads an assistant's turn while it is sampled.
//
// One state machine. A complete answer is the sum of its events, so streamed and whole answers cannot differ.
// Only special tokens are structure; text that looks like it is text. No byte of markup ever comes out as
// text. What the model gets wrong is repaired where the meaning is plain and noted in faults():
//
//   a tag that is not closed                    closed by what follows it around
//   a tools channel inside another channel      ends that channel
//   a call outside a tools channel              opens one
//   text between the channels                   the answer's text
//   an argument that is not of its type         passed on as a JSON string
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "godwit/text/chat_format.h"
#include "godwit/text/stream_decoder.h"
#include "godwit/text/tokenizer.h"

namespace godwit {

struct ChatEvent {
  enum class Kind {
    kReasoning,      // text of the think channel
    kContent,        // text of the response channel
    kCallBegin,      // `text` is the tool's name
    kCallArguments,  // a part of the call's JSON object; all parts together are valid JSON
    kCallEnd,
  };
  Kind kind;
  size_t call = 0;  // from 0; only for calls
  std::string text;
  bool operator==(const ChatEvent&) const = default;
};

class ChatParser {
 public:
  // `thinking`: the prompt ended with the opening of the think channel, otherwise of the response channel.
  ChatParser(const Tokenizer& tokenizer, bool thinking);

  // Reads one id and appends what it completes. After done() everything is ignored.
  void push(int32_t id, std::vector<ChatEvent>& events);
  // No more ids come, whether or not the turn is over. Calls that are still open are ended, so that their
  // JSON is complete.
  void finish(std::vector<ChatEvent>& events);

  bool done() const { return done_; }  // <|end_of_msg|> has come
  bool in_thought() const { return is_open(Tag::kThink); }
  // What was not as the format wants it, in order; empty for a well-formed turn.
  const std::vector<std::string>& faults() const { return faults_; }

 private:
  enum class Tag { kMessage, kThink, kResponse, kTools, kCall, kArgument, kJson, kUnknown };
  enum class Header { kNone, kOpen, kClose };
  struct Attribute {
    std::string key, value;
  };

  static Tag tag_of(std::string_view name);
  static std::string_view name_of(Tag tag);
  bool is_open(Tag tag) const;
  void fault(std::string text) {
    if (std::find(faults_.begin(), faults_.end(), text) == faults_.end()) faults_.push_back(std::move(text));
  }
  void structure(int32_t id, std::vector<ChatEvent>& events);
  void text(std::string_view text, std::vector<ChatEvent>& events);
  void between(std::string_view text, std::vector<ChatEvent>& events);
  void end_header(std::vector<ChatEvent>& events);
  void open(Tag tag, std::string_view name, const std::vector<Attribute>& attributes,
            std::vector<ChatEvent>& events);
  void close_down_to(Tag tag, std::string_view why, std::vector<ChatEvent>& events);
  void close_top(std::vector<ChatEvent>& events);
  void begin_call(const std::vector<Attribute>& attributes, std::vector<ChatEvent>& events);
  void begin_argument(const std::vector<Attribute>& attributes, std::vector<ChatEvent>& events);
  void end_value(std::vector<ChatEvent>& events);
  void arguments(std::string text, std::vector<ChatEvent>& events);

  const Tokenizer* tokenizer_;
  StreamDecoder decoder_;
  int32_t open_id_, close_id_, sep_id_, end_id_;
  std::vector<Tag> stack_ = {Tag::kMessage};
  Header in_header_ = Header::kNone;
  std::string header_;   // between <|open|> or <|close|> and <|sep|>
  std::string waiting_;  // white space between channels; the value of an argument that is not text
  std::string type_;     // of the argument that is open
  size_t calls_ = 0;     // begun so far
  size_t values_ = 0;    // arguments begun in the call that is open
  bool done_ = false;
  std::vector<std::string> faults_;
};

struct ParsedTurn {
  ChatMessage message;
  bool complete = false;  // ended by <|end_of_msg|>
  std::vector<std::string> faults;
};

// A whole turn at once: the sum of a ChatParser's events.
ParsedTurn parse_turn(const Tokenizer& tokenizer, std::span<const int32_t> ids, bool thinking);

// Adds an event to the message it belongs to.
void add_event(const ChatEvent& event, ChatMessage& message);

}  // namespace godwit
