// `godwit chat`: a conversation in the terminal. The state is carried from turn to turn, nothing is fed
// twice.
#include <ATen/ATen.h>
#include <unistd.h>

#include <csignal>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "godwit/cli/commands.h"
#include "godwit/cli/support.h"
#include "godwit/infer/session.h"
#include "godwit/text/chat_format.h"
#include "godwit/text/chat_parser.h"

namespace godwit::cli {
namespace {

volatile std::sig_atomic_t g_interrupted = 0;

// While it lives, Ctrl-C sets g_interrupted instead of ending the program.
class CatchInterrupt {
 public:
  CatchInterrupt() {
    g_interrupted = 0;
    before_ = std::signal(SIGINT, [](int) { g_interrupted = 1; });
  }
  ~CatchInterrupt() { std::signal(SIGINT, before_); }
  CatchInterrupt(const CatchInterrupt&) = delete;
  CatchInterrupt& operator=(const CatchInterrupt&) = delete;

 private:
  void (*before_)(int) = nullptr;
};

// The tags that are open while a turn is sampled, to close them when it is cut off.
class OpenTags {
 public:
  OpenTags(const Tokenizer& tokenizer, bool thinking)
      : tokenizer_(tokenizer), tags_{thinking ? "think" : "response"}, thinking_only_(thinking) {}

  void push(int32_t id) {
    if (id == tokenizer_.special_id(kOpen) || id == tokenizer_.special_id(kClose)) {
      header_ = id == tokenizer_.special_id(kOpen) ? Header::kOpen : Header::kClose;
      name_.clear();
    } else if (id == tokenizer_.special_id(kSep)) {
      end_header();
    } else if (header_ != Header::kNone) {
      name_ += tokenizer_.token_bytes(id);
    }
  }

  // What is missing up to the end of the message.
  std::vector<ChatSegment> closing() {
    std::vector<ChatSegment> out;
    if (header_ != Header::kNone) {
      add_control(kSep, out);
      end_header();
    }
    while (!tags_.empty()) {
      add_tag(kClose, tags_.back(), out);
      tags_.pop_back();
    }
    if (thinking_only_) {  // a response always follows the thoughts
      add_tag(kOpen, "response", out);
      add_tag(kClose, "response", out);
    }
    add_tag(kClose, "message", out);
    add_control(kEndOfMsg, out);
    return out;
  }

 private:
  enum class Header { kNone, kOpen, kClose };

  static void add_control(std::string_view token, std::vector<ChatSegment>& out) {
    ChatSegment& segment = out.emplace_back();
    segment.text = token;
    segment.control = true;
  }
  static void add_tag(std::string_view kind, const std::string& tag, std::vector<ChatSegment>& out) {
    add_control(kind, out);
    out.emplace_back().text = tag;
    add_control(kSep, out);
  }

  void end_header() {
    if (header_ == Header::kOpen) {
      tags_.push_back(name_.substr(0, name_.find(' ')));
      thinking_only_ = false;
    } else if (header_ == Header::kClose && !tags_.empty()) {
      tags_.pop_back();
    }
    header_ = Header::kNone;
  }

  const Tokenizer& tokenizer_;
  std::vector<std::string> tags_;  // below the message
  bool thinking_only_;             // no channel after the thoughts yet
  Header header_ = Header::kNone;
  std::string name_;
};

// Thoughts in grey and only for a person to see; calls as text.
class Printer {
 public:
  Printer() : terminal_(::isatty(STDOUT_FILENO) == 1) {}
  void print(const std::vector<ChatEvent>& events) {
    for (const ChatEvent& event : events) {
      if (event.kind == ChatEvent::Kind::kReasoning) {
        if (terminal_) print_out("\x1b[90m{}\x1b[0m", event.text);
        thought_ = thought_ || terminal_;
        continue;
      }
      if (thought_) write_out("\n");
      thought_ = false;
      if (event.kind == ChatEvent::Kind::kCallBegin)
        print_out("\n[call {} ", event.text);
      else if (event.kind == ChatEvent::Kind::kCallEnd)
        write_out("]");
      else
        write_out(event.text);
    }
  }

 private:
  bool terminal_;
  bool thought_ = false;  // thoughts stand on the line
};

ChatMessage message(ChatRole role, const std::string& text) {
  ChatMessage out;
  out.role = role;
  out.content.emplace_back().text = text;
  return out;
}

// The probability of <|open|> where the format opens the assistant's first channel: near 1 in a model that
// knows the format.
double knows_format(const LoadedModel& model, const ChatOptions& options) {
  const std::vector<ChatMessage> hello = {message(ChatRole::kUser, "Hello.")};
  std::vector<int32_t> ids = encode_chat(render_chat(hello, options), model.tokenizer).ids;
  const int32_t open = model.tokenizer.special_id(kOpen);
  while (ids.back() != open) ids.pop_back();
  ids.pop_back();
  return Session(model).feed(ids).softmax(0)[open].item<double>();
}

// One answer, streamed. Returns the message as far as it came, its end always in the session's state.
ChatMessage answer(const LoadedModel& model, Session& session, const std::vector<int32_t>& ids,
                   const GenerateOptions& generation, bool thinking) {
  ChatParser parser(model.tokenizer, thinking);
  OpenTags tags(model.tokenizer, thinking);
  Printer printer;
  ChatMessage assistant;
  assistant.role = ChatRole::kAssistant;
  const auto show = [&](const std::vector<ChatEvent>& events) {
    for (const ChatEvent& event : events) add_event(event, assistant);
    printer.print(events);
  };
  const CatchInterrupt guard;
  const Generation out = session.generate(ids, generation, [&](int32_t id) {
    std::vector<ChatEvent> events;
    parser.push(id, events);
    tags.push(id);
    show(events);
    return g_interrupted == 0;
  });
  std::vector<ChatEvent> events;
  parser.finish(events);
  show(events);
  const bool cut = out.finish_reason != "stop";
  if (cut) session.feed(encode_chat(tags.closing(), model.tokenizer).ids);
  write_out(cut ? "...\n" : "\n");
  return assistant;
}

}  // namespace

int run_chat(const ChatArgs& args) {
  const LoadedModel model = load(args.model);
  ChatOptions options;
  options.thinking = !args.no_thinking;
  const GenerateOptions generation{
      .sampling = sampling_params(args.model),
      .max_tokens = args.model.max_tokens,
      .stop_ids = {model.tokenizer.special_id(kEndOfMsg)},
      .allowed_specials = {model.tokenizer.special_id(kOpen), model.tokenizer.special_id(kClose),
                           model.tokenizer.special_id(kSep)}};
  if (const double p = knows_format(model, options); p < 0.5) {
    fmt::print(stderr,
               "godwit: this model has not learnt the chat format (<|open|> has probability {:.2g} where it "
               "must come): expect text, not answers\n",
               p);
  }
  const bool person = ::isatty(STDIN_FILENO) == 1;
  Session session(model);
  std::optional<ChatMessage> last;
  std::string line;
  while (true) {
    if (person) write_out("> ");
    if (!std::getline(std::cin, line)) break;
    if (line.empty()) continue;
    std::vector<ChatMessage> next;
    if (!last && !args.system.empty()) next.push_back(message(ChatRole::kSystem, args.system));
    next.push_back(message(ChatRole::kUser, line));
    const auto segments = last ? render_continuation(*last, next, options) : render_chat(next, options);
    last = answer(model, session, encode_chat(segments, model.tokenizer).ids, generation, options.thinking);
  }
  if (person) write_out("\n");
  return 0;
}

}  // namespace godwit::cli
