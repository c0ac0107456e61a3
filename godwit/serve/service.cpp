#include "godwit/serve/service.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "godwit/base/log.h"
#include "godwit/infer/constraint.h"
#include "godwit/io/image.h"
#include "godwit/io/image_processor.h"
#include "godwit/serve/answer.h"
#include "godwit/serve/image_url.h"
#include "godwit/serve/page.h"
#include "godwit/text/utf8.h"

namespace godwit::serve {
namespace {

// Of one request: their patches lie in memory while it waits, 9 KiB a token.
constexpr int64_t kMostImageTokens = 32768;

int64_t now_s() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// In time that does not depend on where the two differ.
bool equal_secrets(std::string_view given, std::string_view wanted) {
  unsigned char differs = given.size() == wanted.size() ? 0 : 1;
  for (size_t i = 0; i < given.size(); ++i)
    differs |= static_cast<unsigned char>(given[i] ^ wanted[wanted.empty() ? 0 : i % wanted.size()]);
  return differs == 0;
}

}  // namespace

Service::Service(const LoadedModel& model, const EngineOptions& engine, ServiceOptions options)
    : model_(model), options_(std::move(options)), engine_(model, engine), started_(now_s()) {
  thread_ = std::thread([this] { run_engine(); });
}

Service::~Service() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Service::run_engine() {
  for (;;) {
    while (engine_.step()) {
      const std::lock_guard lock(mutex_);
      if (stopping_) return;
    }
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return work_ || stopping_; });
    if (stopping_) return;
    work_ = false;
  }
}

void Service::wake() {
  {
    const std::lock_guard lock(mutex_);
    work_ = true;
  }
  changed_.notify_all();
}

void Service::handle(HttpRequest request, std::shared_ptr<HttpReply> reply) {
  int status = 500;
  std::string message, param;
  try {
    return route(request, reply);
  } catch (const ApiError& e) {
    status = e.status();
    message = e.what();
    param = e.param();
  } catch (const Error& e) {  // what the engine refuses
    status = 400;
    message = e.what();
  } catch (const std::exception& e) {
    log_warn("serve: {} {}: {}", request.method, request.path, e.what());
    message = "an internal fault";
  }
  HttpResponse response{.status = status, .body = error_body(status, replace_invalid_utf8(message), param)};
  if (status == 429 || status == 503) response.headers = {{"retry-after", "1"}};
  if (status == 401) response.headers = {{"www-authenticate", "Bearer"}};
  reply->send(std::move(response));
}

void Service::check_key(const HttpRequest& request) const {
  if (options_.api_key.empty()) return;
  const auto it = request.headers.find("authorization");
  const std::string_view given = it == request.headers.end() ? std::string_view() : it->second;
  constexpr std::string_view kBearer = "Bearer ";
  if (!given.starts_with(kBearer) || !equal_secrets(given.substr(kBearer.size()), options_.api_key))
    throw ApiError(401, "a valid API key is needed: Authorization: Bearer KEY");
}

void Service::route(const HttpRequest& request, const std::shared_ptr<HttpReply>& reply) {
  struct Route {
    std::string_view method, path;
    std::function<void()> run;
  };
  const bool open_to_all = request.path == "/health" || request.path == "/";
  if (!open_to_all) check_key(request);
  const Route routes[] = {
      {"GET", "/",
       [&] { reply->send({.content_type = "text/html; charset=utf-8", .body = std::string(page())}); }},
      {"GET", "/health", [&] { reply->send({.body = R"({"status":"ok"})"}); }},
      {"GET", "/metrics",
       [&] {
         reply->send({.content_type = "text/plain; version=0.0.4", .body = metrics_.text(engine_.stats())});
       }},
      {"GET", "/v1/models",
       [&] {
         const Json model = {{"id", options_.model_name},
                             {"object", "model"},
                             {"created", started_},
                             {"owned_by", "godwit"},
                             {"max_model_len", engine_.max_context()},
                             {"vision", model_.weights.vision.has_value()}};
         reply->send({.body = to_text({{"object", "list"}, {"data", Json::array({model})}})});
       }},
      {"POST", "/v1/chat/completions", [&] { chat(request, reply); }},
      {"POST", "/v1/completions", [&] { completions(request, reply); }},
      {"POST", "/tokenize", [&] { tokenize(request, *reply); }},
      {"POST", "/detokenize", [&] { detokenize(request, *reply); }},
  };
  bool known = false;
  for (const Route& route : routes) {
    if (route.path != request.path) continue;
    known = true;
    if (route.method == request.method) return route.run();
  }
  if (known)
    throw ApiError(405, fmt::format("{} is not for {}", request.path, replace_invalid_utf8(request.method)));
  throw ApiError(404, fmt::format("there is no {}", replace_invalid_utf8(request.path)));
}

void Service::check_model(const Json& body) const {
  const auto it = body.find("model");
  if (it == body.end() || it->is_null()) return;
  if (!it->is_string()) throw ApiError(400, "model: must be a text", "model");
  const auto& name = it->get_ref<const std::string&>();
  if (name != options_.model_name)
    throw ApiError(404,
                   fmt::format("the model '{}' does not exist; this server has '{}'",
                               replace_invalid_utf8(name), options_.model_name),
                   "model");
}

void Service::submit(std::vector<Request> requests, const std::shared_ptr<HttpReply>& reply) {
  if (engine_.stats().waiting >= options_.max_waiting)
    throw ApiError(429,
                   fmt::format("{} requests are waiting already; try again later", options_.max_waiting));
  auto ids = std::make_shared<std::vector<int64_t>>();
  try {
    for (Request& request : requests) ids->push_back(engine_.submit(std::move(request)));
  } catch (...) {
    for (const int64_t id : *ids) engine_.abort(id);
    wake();
    throw;
  }
  reply->on_gone([this, ids] {
    for (const int64_t id : *ids) engine_.abort(id);
    wake();
  });
  wake();
}

// The pictures of the messages, in order; their parts get size and tokens. What a picture will take is known
// from its header: many large ones are refused before they are decoded.
MediaList Service::pictures(std::vector<ChatMessage>& messages) const {
  int64_t tokens = 0;
  const auto bytes_of = [&](const std::string& url, const std::string& where) {
    std::string bytes = image_bytes(url, where, options_.image_directory);
    const io::ImageInfo info = io::image_info(io::as_bytes(bytes), where);
    tokens += io::plan_image(info.width, info.height, model_.images).tokens;
    const int64_t most = std::min(engine_.max_context() - 1, kMostImageTokens);
    check(tokens <= most, "{}: the pictures take {} tokens up to here; this server takes {} in a request",
          where, tokens, most);
    return bytes;
  };
  try {
    return read_images(model_, messages, bytes_of);
  } catch (const ApiError&) {
    throw;
  } catch (const Error& e) {
    throw ApiError(400, e.what(), "messages");
  }
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
                   tools ? "tools" : "response_format");
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

void Service::chat(const HttpRequest& request, const std::shared_ptr<HttpReply>& reply) {
  const Json body = parse_object(request.body);
  check_model(body);
  ChatRequest chat = chat_request(body);
  MediaList media = pictures(chat.messages);
  std::vector<ChatSegment> segments;
  try {
    segments = render_chat(chat.messages, chat.options);
  } catch (const Error& e) {
    throw ApiError(400, e.what(), "messages");
  }
  const Tokenizer& tokenizer = model_.tokenizer;
  Request r{.prompt = encode_chat(segments, tokenizer).ids,
            .media = std::move(media),
            .sampling = chat.params.sampling,
            .max_tokens = chat.params.max_tokens.value_or(engine_.max_context()),
            .stop_ids = {tokenizer.special_id(kEndOfMsg)},
            .allowed_specials = {tokenizer.special_id(kOpen), tokenizer.special_id(kClose),
                                 tokenizer.special_id(kSep)},
            .top_logprobs = chat.params.top_logprobs,
            .choices = chat.params.choices};
  r.stop_ids.insert(r.stop_ids.end(), chat.params.stop_ids.begin(), chat.params.stop_ids.end());
  auto hurried = constrain(chat, r);
  const auto answer =
      std::make_shared<Answer>(AnswerHead{.id = fmt::format("chatcmpl-{}-{}", started_, next_id_++),
                                          .model = options_.model_name,
                                          .created = now_s(),
                                          .params = chat.params,
                                          .chat = true,
                                          .thinking = chat.options.thinking,
                                          .choices = chat.params.choices,
                                          .hurried = std::move(hurried)},
                               tokenizer, reply, metrics_);
  r.on_token = [answer](int64_t choice, const DrawnToken& token) { return answer->on_token(choice, token); };
  r.on_finish = [answer](int64_t choice, const Finish& finish) { answer->on_finish(choice, finish); };
  std::vector<Request> requests;
  requests.push_back(std::move(r));
  submit(std::move(requests), reply);
}

void Service::completions(const HttpRequest& request, const std::shared_ptr<HttpReply>& reply) {
  const Json body = parse_object(request.body);
  check_model(body);
  const CompletionParams params = completion_params(body, /*chat=*/false);
  for (const char* key : {"suffix", "best_of", "response_format"}) {
    if (body.contains(key) && !body[key].is_null())
      throw ApiError(400, fmt::format("{}: not supported", key), key);
  }
  const auto prompts = completion_prompts(body, model_.tokenizer);
  const auto count = static_cast<int64_t>(prompts.size());
  if (count * params.choices > 128)
    throw ApiError(400, "prompt: prompts times n must be at most 128", "prompt");
  const auto answer =
      std::make_shared<Answer>(AnswerHead{.id = fmt::format("cmpl-{}-{}", started_, next_id_++),
                                          .model = options_.model_name,
                                          .created = now_s(),
                                          .params = params,
                                          .chat = false,
                                          .choices = count * params.choices},
                               model_.tokenizer, reply, metrics_);
  std::vector<int32_t> stop_ids = text_stop_ids(model_);
  stop_ids.insert(stop_ids.end(), params.stop_ids.begin(), params.stop_ids.end());
  std::vector<Request> requests;
  for (int64_t p = 0; p < count; ++p) {
    const int64_t first = p * params.choices;
    requests.push_back(
        {.prompt = prompts[p],
         .sampling = params.sampling,
         .max_tokens = params.max_tokens.value_or(16),
         .stop_ids = stop_ids,
         .top_logprobs = params.top_logprobs,
         .choices = params.choices,
         .on_token = [answer, first](
                         int64_t choice,
                         const DrawnToken& token) { return answer->on_token(first + choice, token); },
         .on_finish = [answer, first](int64_t choice,
                                      const Finish& finish) { answer->on_finish(first + choice, finish); }});
  }
  submit(std::move(requests), reply);
}

void Service::tokenize(const HttpRequest& request, HttpReply& reply) const {
  const Json body = parse_object(request.body);
  std::vector<int32_t> ids;
  if (body.contains("messages")) {
    ChatRequest chat = chat_request(body);
    pictures(chat.messages);
    ids = encode_chat(render_chat(chat.messages, chat.options), model_.tokenizer).ids;
  } else {
    const auto prompts = completion_prompts(body, model_.tokenizer);
    if (prompts.size() != 1) throw ApiError(400, "prompt: one text", "prompt");
    ids = prompts[0];
  }
  reply.send(
      {.body = to_text({{"count", ids.size()}, {"max_model_len", engine_.max_context()}, {"tokens", ids}})});
}

void Service::detokenize(const HttpRequest& request, HttpReply& reply) const {
  const Json body = parse_object(request.body);
  const auto it = body.find("tokens");
  if (it == body.end() || !it->is_array()) throw ApiError(400, "tokens: a list of ids is needed", "tokens");
  const auto prompts = completion_prompts({{"prompt", Json::array({*it})}}, model_.tokenizer);
  for (const int32_t id : prompts[0]) {
    if (id >= model_.tokenizer.vocab_size())
      throw ApiError(400, fmt::format("tokens: there is no id {}", id), "tokens");
  }
  reply.send({.body = to_text({{"prompt", replace_invalid_utf8(model_.tokenizer.decode(prompts[0]))}})});
}

}  // namespace godwit::serve
