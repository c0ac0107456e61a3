// The calls that want tokens, or have to do with them.
#include <algorithm>
#include <chrono>
#include <utility>

#include "godwit/infer/constraint.h"
#include "godwit/io/image.h"
#include "godwit/io/image_processor.h"
#include "godwit/serve/answer.h"
#include "godwit/serve/image_url.h"
#include "godwit/serve/request_body.h"
#include "godwit/serve/service.h"
#include "godwit/text/utf8.h"

namespace godwit::serve {
namespace {

constexpr size_t kMostChoices = 128;  // of all prompts of a request
// Of one request: their patches lie in memory while it waits, 9 KiB a token.
constexpr int64_t kMostImageTokens = 32768;
constexpr int64_t kMostHeldImageTokens = 4 * kMostImageTokens;  // of all requests
// What /tokenize counts up to: four times the longest context there is.
constexpr int64_t kMostCounted = int64_t{1} << 22;

int64_t now_s() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

Json body_of(const HttpRequest& request, HttpReply& reply) {
  return parse_object(request.body, [&] { return reply.gone(); });
}

// Where clients speak of a limit they mean the answer's text.
int64_t answer_limit(const CompletionParams& params, int64_t fallback) {
  return params.max_tokens.value_or(fallback);
}

}  // namespace

// For a prompt that is to be answered.
PromptReader Service::reader(const Exchange& x, const char* param) const {
  const int64_t most = engine_.max_context();
  return {model_.tokenizer,
          {.tokens = most,
           .param = param,
           .too_long = fmt::format("this server's context holds {} with the answer", most)},
          [reply = x.reply] { return reply->gone(); }};
}

void Service::submit(const Exchange& x, std::vector<Request> requests, const char* param) {
  const auto group = std::make_shared<RequestGroup>();
  group->on_place = [ticket = x.ticket, held = x.pictures] { ticket->start(); };
  auto ids = std::make_shared<std::vector<int64_t>>();
  try {
    for (Request& request : requests) {
      request.group = group;
      ids->push_back(engine_.submit(std::move(request)));
    }
  } catch (...) {
    for (const int64_t id : *ids) engine_.abort(id);
    wake();
    client_error(param, [] { throw; });
  }
  x.reply->on_gone([this, ids] {
    for (const int64_t id : *ids) engine_.abort(id);
    wake();
  });
  wake();
}

// The pictures of the messages, in order; their parts get size and tokens. What a picture will take is known
// from its header: many large ones are refused before they are decoded.
MediaList Service::pictures(std::vector<ChatMessage>& messages, HttpReply& reply, PictureHold& hold) const {
  int64_t tokens = 0;
  const auto bytes_of = [&](const std::string& url, const std::string& where) {
    if (reply.gone()) throw ClientGone();
    std::string bytes = image_bytes(url, where, options_.image_directory);
    const io::ImageInfo info = io::image_info(io::as_bytes(bytes), where);
    const int64_t more = io::plan_image(info.width, info.height, model_.images).tokens;
    tokens += more;
    const int64_t most = std::min(engine_.max_context() - 1, kMostImageTokens);
    check(tokens <= most, "{}: the pictures take {} tokens up to here; this server takes {} in a request",
          where, tokens, most);
    if (!hold.add(more, kMostHeldImageTokens))
      throw ApiError(503, "too many pictures wait at once; try again later");
    return bytes;
  };
  return client_error("messages", [&] { return read_images(model_, messages, bytes_of); });
}

std::shared_ptr<const TokenTrie> Service::trie() {
  std::call_once(trie_made_, [&] { trie_ = std::make_shared<const TokenTrie>(model_.tokenizer); });
  return trie_;
}

// Holds the request's choices to the form that the client wants; gives what is set where the limit of tokens
// has had a hand in it.
std::vector<std::shared_ptr<std::atomic<bool>>> Service::constrain(const ChatRequest& chat,
                                                                   Request& request) {
  const auto format = turn_format(chat);
  std::vector<std::shared_ptr<std::atomic<bool>>> hurried;
  if (!format) return hurried;
  std::shared_ptr<const Grammar> grammar;
  try {
    grammar = turn_grammar(*format, model_.tokenizer);
  } catch (const Error& e) {
    const bool tools = std::string_view(e.what()).starts_with("tool");
    throw ApiError(400, fmt::format("{}{}", tools ? "" : "response_format: ", e.what()),
                   tools ? param_of(e.what(), "tools") : "response_format");
  }
  for (int64_t i = 0; i < request.choices; ++i) hurried.push_back(std::make_shared<std::atomic<bool>>(false));
  const int64_t budget =
      std::min(request.max_tokens, engine_.max_context() - static_cast<int64_t>(request.prompt.size()));
  // The engine asks for one a choice, in their order.
  request.constraint = [grammar, trie = trie(), budget, hurried, next = size_t{0}]() mutable {
    return std::make_unique<GrammarConstraint>(grammar, trie, budget, hurried[next++]);
  };
  return hurried;
}

void Service::chat(const Exchange& x) {
  const Json body = body_of(x.request, *x.reply);
  check_keys(body, Call::kChat);
  check_model(body);
  ChatRequest chat = chat_request(body);
  check_ids(chat.params, model_.config.vocab_size);
  MediaList media = pictures(chat.messages, *x.reply, *x.pictures);
  const auto segments = client_error("messages", [&] { return render_chat(chat.messages, chat.options); });
  const Tokenizer& tokenizer = model_.tokenizer;
  std::vector<int32_t> stop_ids = chat.params.stop_ids;
  if (!chat.params.ignore_eos) stop_ids.push_back(tokenizer.special_id(kEndOfMsg));
  Request r{.prompt = reader(x, "messages").chat(segments),
            .media = std::move(media),
            .sampling = chat.params.sampling,
            .max_tokens = answer_limit(chat.params, engine_.max_context()),
            .min_tokens = chat.params.min_tokens,
            .stop_ids = std::move(stop_ids),
            .allowed_specials = {tokenizer.special_id(kOpen), tokenizer.special_id(kClose),
                                 tokenizer.special_id(kSep)},
            .top_logprobs = chat.params.top_logprobs,
            .choices = chat.params.choices};
  auto hurried = constrain(chat, r);
  const auto answer =
      std::make_shared<Answer>(AnswerHead{.id = fmt::format("chatcmpl-{}-{}", started_, next_id_++),
                                          .model = options_.model_name,
                                          .created = now_s(),
                                          .arrived = x.ticket->arrived(),
                                          .params = chat.params,
                                          .prompt_tokens = static_cast<int64_t>(r.prompt.size()),
                                          .chat = true,
                                          .thinking = chat.options.thinking,
                                          .choices = chat.params.choices,
                                          .hurried = std::move(hurried)},
                               tokenizer, x.reply, metrics_);
  r.on_token = [answer](int64_t choice, const DrawnToken& token) { return answer->on_token(choice, token); };
  r.on_finish = [answer](int64_t choice, const Finish& finish) { answer->on_finish(choice, finish); };
  std::vector<Request> requests;
  requests.push_back(std::move(r));
  submit(x, std::move(requests), "messages");
}

void Service::completions(const Exchange& x) {
  const Json body = body_of(x.request, *x.reply);
  check_keys(body, Call::kCompletion);
  check_model(body);
  const CompletionParams params = completion_params(body, /*chat=*/false);
  check_ids(params, model_.config.vocab_size);
  auto prompts = completion_prompts(body, reader(x, "prompt"),
                                    {.most_prompts = kMostChoices / static_cast<size_t>(params.choices),
                                     .vocab_size = model_.config.vocab_size});
  const auto count = static_cast<int64_t>(prompts.size());
  int64_t prompt_tokens = 0;
  for (const auto& prompt : prompts) prompt_tokens += static_cast<int64_t>(prompt.size());
  std::vector<std::string> echo;
  const auto text_of = [&](const auto& ids) { return replace_invalid_utf8(model_.tokenizer.decode(ids)); };
  for (const auto& prompt : prompts)
    echo.push_back(params.echo ? client_error("prompt", [&] { return text_of(prompt); }) : "");
  const auto answer =
      std::make_shared<Answer>(AnswerHead{.id = fmt::format("cmpl-{}-{}", started_, next_id_++),
                                          .model = options_.model_name,
                                          .created = now_s(),
                                          .arrived = x.ticket->arrived(),
                                          .params = params,
                                          .prompt_tokens = prompt_tokens,
                                          .chat = false,
                                          .choices = count * params.choices,
                                          .echo = std::move(echo)},
                               model_.tokenizer, x.reply, metrics_);
  std::vector<int32_t> stop_ids = params.stop_ids;
  if (!params.ignore_eos) {
    const std::vector<int32_t> own = text_stop_ids(model_);
    stop_ids.insert(stop_ids.end(), own.begin(), own.end());
  }
  std::vector<Request> requests;
  for (int64_t p = 0; p < count; ++p) {
    const int64_t first = p * params.choices;
    requests.push_back(
        {.prompt = std::move(prompts[p]),
         .sampling = params.sampling,
         .max_tokens = answer_limit(params, 16),
         .min_tokens = params.min_tokens,
         .stop_ids = stop_ids,
         .top_logprobs = params.top_logprobs,
         .choices = params.choices,
         .on_token = [answer, first](
                         int64_t choice,
                         const DrawnToken& token) { return answer->on_token(first + choice, token); },
         .on_finish = [answer, first](int64_t choice,
                                      const Finish& finish) { answer->on_finish(first + choice, finish); }});
  }
  submit(x, std::move(requests), "prompt");
}

void Service::tokenize(const Exchange& x) {
  const Json body = body_of(x.request, *x.reply);
  check_keys(body, Call::kTokenize);
  check_model(body);
  const int64_t most = std::max(kMostCounted, engine_.max_context());
  const auto counter = [&](const char* param) {
    return PromptReader(
        model_.tokenizer,
        {.tokens = most + 1, .param = param, .too_long = fmt::format("{} is the most here", most)},
        [&] { return x.reply->gone(); });
  };
  std::vector<int32_t> ids;
  const bool chat = body.contains("messages");
  if (chat && body.contains("prompt")) throw ApiError(400, "prompt: goes without messages", "prompt");
  if (chat) {
    ChatRequest request = chat_request(body);
    pictures(request.messages, *x.reply, *x.pictures);
    ids = counter("messages").chat(client_error("messages", [&] {
      return render_chat(request.messages, request.options);
    }));
  } else if (body.contains("prompt") && body["prompt"] == "") {
    ids = {};
  } else {
    ids = completion_prompts(body, counter("prompt"),
                             {.most_prompts = 1, .vocab_size = model_.config.vocab_size})[0];
  }
  // Written by hand: as JSON values millions of ids would take ten times their text.
  std::string out =
      fmt::format(R"({{"count":{},"max_model_len":{},"tokens":[)", ids.size(), engine_.max_context());
  for (size_t i = 0; i < ids.size(); ++i) out += (i > 0 ? "," : "") + std::to_string(ids[i]);
  out += "]";
  const auto strings = body.find("return_token_strs");
  if (strings != body.end() && *strings == true) {
    Json texts = Json::array();
    for (const int32_t id : ids) {
      const bool known = id < model_.tokenizer.vocab_size();
      texts.push_back(known ? replace_invalid_utf8(model_.tokenizer.token_bytes(id)) : "");
    }
    out += ",\"token_strs\":" + to_text(texts);
  }
  x.reply->send({.body = out + "}"});
}

void Service::detokenize(const Exchange& x) {
  const Json body = body_of(x.request, *x.reply);
  check_keys(body, Call::kDetokenize);
  check_model(body);
  const auto it = body.find("tokens");
  if (it == body.end() || !it->is_array()) throw ApiError(400, "tokens: a list of ids is needed", "tokens");
  const std::vector<int32_t> ids = token_ids(*it, "tokens", model_.tokenizer.vocab_size());
  x.reply->send({.body = to_text({{"prompt", replace_invalid_utf8(model_.tokenizer.decode(ids))}})});
}

}  // namespace godwit::serve
