// `godwit chat`: a conversation in the terminal. Every turn is a request with the whole conversation; what
// was read before comes from the engine's prefix cache.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <unistd.h>

#include <csignal>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "godwit/base/check.h"
#include "godwit/cli/commands.h"
#include "godwit/cli/support.h"
#include "godwit/infer/close_turn.h"
#include "godwit/infer/generate.h"
#include "godwit/model/forward.h"
#include "godwit/ops/ops.h"
#include "godwit/text/chat_format.h"
#include "godwit/text/chat_parser.h"

namespace godwit::cli {
namespace {

constexpr std::string_view kImageCommand = "/image ";
constexpr int64_t kChatContext = 131072;  // tokens a conversation may have, if the model has as many

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

// Thoughts in grey, calls as text.
class Printer {
 public:
  void print(const std::vector<ChatEvent>& events) {
    for (const ChatEvent& event : events) {
      const bool thought = event.kind == ChatEvent::Kind::kReasoning;
      if (in_thought_ && !thought) write_out("\n");
      in_thought_ = thought;
      switch (event.kind) {
        case ChatEvent::Kind::kReasoning:
          print_out("{}{}{}", grey_, event.text, grey_[0] == '\0' ? "" : "\x1b[0m");
          break;
        case ChatEvent::Kind::kCallBegin:
          print_out("\n[call {} ", event.text);
          break;
        case ChatEvent::Kind::kCallEnd:
          write_out("]");
          break;
        case ChatEvent::Kind::kContent:
        case ChatEvent::Kind::kCallArguments:
          write_out(event.text);
      }
    }
  }

 private:
  const char* grey_ = ::isatty(STDOUT_FILENO) == 1 ? "\x1b[90m" : "";
  bool in_thought_ = false;
};

// A picture that cannot be read does not end the conversation.
void add_picture(const LoadedModel& model, const std::string& path, MediaList& pictures) {
  try {
    pictures.push_back(load_picture(model, path));
  } catch (const Error& error) {
    fmt::print(stderr, "godwit: {}\n", error.what());
  }
}

ChatMessage message(ChatRole role, const std::string& text, const MediaList& pictures = {}) {
  ChatMessage out;
  out.role = role;
  for (const auto& item : pictures) {
    ChatPart& part = out.content.emplace_back();
    part.is_image = true;
    part.width = item->width;
    part.height = item->height;
    part.tokens = item->tokens;
  }
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
  const at::NoGradGuard no_grad;
  const at::Tensor batch = at::tensor(std::vector<int64_t>(ids.begin(), ids.end()), at::kLong);
  const PackedBatch prompt{.ids = batch.to(model.device), .cu_seqlens = make_cu_seqlens({batch.numel()})};
  const at::Tensor hidden = forward_hidden(model.config, model.weights, prompt).slice(0, -1);
  const at::Tensor logits = ops::linear(hidden, head_weight(model.config, model.weights)).to(at::kFloat);
  return logits[0].softmax(0)[open].item<double>();
}

// What the conversation has so far, and how it goes on.
struct Conversation {
  const LoadedModel& model;
  Engine& engine;
  Request request;  // without its prompt; `media` grows with the conversation
  bool thinking = true;
  std::vector<int32_t> ids = {};

  void add(const std::vector<int32_t>& more) { ids.insert(ids.end(), more.begin(), more.end()); }
};

// One answer, streamed. Returns the message as far as it came; the conversation then holds it and its end.
ChatMessage answer(Conversation& conversation) {
  const LoadedModel& model = conversation.model;
  const bool thinking = conversation.thinking;
  ChatParser parser(model.tokenizer, thinking);
  Printer printer;
  ChatMessage assistant;
  assistant.role = ChatRole::kAssistant;
  const auto show = [&](const std::vector<ChatEvent>& events) {
    for (const ChatEvent& event : events) add_event(event, assistant);
    printer.print(events);
  };
  const CatchInterrupt guard;
  Request request = conversation.request;
  request.prompt = conversation.ids;
  request.on_token = [&](int64_t, const DrawnToken& token) {
    std::vector<ChatEvent> events;
    parser.push(token.id, events);
    show(events);
    return g_interrupted == 0;
  };
  const Generation out = generate(conversation.engine, std::move(request));
  std::vector<ChatEvent> events;
  parser.finish(events);
  show(events);
  conversation.add(out.ids);
  const bool cut = out.finish.reason != FinishReason::kStop;
  if (cut) {
    conversation.add(encode_chat(close_turn(model.tokenizer, out.ids, thinking), model.tokenizer).ids);
  } else {
    conversation.add({out.finish.stop_id});
  }
  write_out(cut ? "...\n" : "\n");
  return assistant;
}

}  // namespace

int run_chat(const ChatArgs& args) {
  const LoadedModel model = load(args.model);
  MediaList pictures;  // of the next message
  for (const std::string& path : args.images) pictures.push_back(load_picture(model, path));
  ChatOptions options;
  options.thinking = !args.no_thinking;
  Engine engine(model, single_sequence(model, kChatContext, args.model.draft_tokens));
  Conversation conversation{
      .model = model,
      .engine = engine,
      .request = {.prompt = {},
                  .sampling = sampling_params(args.model),
                  .max_tokens = args.model.max_tokens,
                  .stop_ids = {model.tokenizer.special_id(kEndOfMsg)},
                  .allowed_specials = {model.tokenizer.special_id(kOpen), model.tokenizer.special_id(kClose),
                                       model.tokenizer.special_id(kSep)}},
      .thinking = options.thinking};
  if (const double p = knows_format(model, options); p < 0.5) {
    fmt::print(stderr,
               "godwit: this model has not learnt the chat format (<|open|> has probability {:.2g} where it "
               "must come): expect text, not answers\n",
               p);
  }
  const bool person = ::isatty(STDIN_FILENO) == 1;
  std::optional<ChatMessage> last;
  std::string line;
  while (true) {
    if (person) write_out("> ");
    if (!std::getline(std::cin, line)) break;
    if (line.empty()) continue;
    if (line.starts_with(kImageCommand)) {
      add_picture(model, line.substr(kImageCommand.size()), pictures);
      continue;
    }
    std::vector<ChatMessage> next;
    if (!last && !args.system.empty()) next.push_back(message(ChatRole::kSystem, args.system));
    next.push_back(message(ChatRole::kUser, line, pictures));
    MediaList& all = conversation.request.media;
    all.insert(all.end(), pictures.begin(), pictures.end());
    pictures.clear();
    const auto segments = last ? render_continuation(*last, next, options) : render_chat(next, options);
    conversation.add(encode_chat(segments, model.tokenizer).ids);
    last = answer(conversation);
  }
  if (person) write_out("\n");
  return 0;
}

}  // namespace godwit::cli
