#include "godwit/serve/service.h"

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdlib>
#include <utility>

#include "godwit/base/log.h"
#include "godwit/serve/page.h"
#include "godwit/text/utf8.h"

namespace godwit::serve {
namespace {

constexpr std::string_view kModels = "/v1/models/";  // and a name

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

std::string lower_case(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

// JSON, or no word about it. `curl -d` calls whatever it sends a form.
void check_media_type(const HttpRequest& request) {
  const std::string encoding = lower_case(header_of(request, "content-encoding"));
  if (!encoding.empty() && encoding != "identity")
    throw ApiError(415, "a content-encoding is not supported: send the body as it is");
  const std::string given = lower_case(header_of(request, "content-type"));
  std::string type = given.substr(0, given.find(';'));
  while (!type.empty() && type.back() == ' ') type.pop_back();
  const bool json = type.empty() || type == "application/json" || type == "text/json" ||
                    type == "application/x-www-form-urlencoded" ||
                    (type.starts_with("application/") && type.ends_with("+json"));
  if (!json)
    throw ApiError(415, fmt::format("the body must be application/json, not {}", replace_invalid_utf8(type)));
  const size_t charset = given.find("charset=");
  if (charset == given.npos) return;
  std::string name = given.substr(charset + 8);
  name = name.substr(0, name.find_first_of("; "));
  std::erase(name, '"');
  if (name != "utf-8" && name != "utf8" && name != "us-ascii")
    throw ApiError(415, fmt::format("the body must be UTF-8, not {}", replace_invalid_utf8(name)));
}

// "a%2Fb" to "a/b".
std::string percent_decoded(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size() &&
        std::isxdigit(static_cast<unsigned char>(text[i + 1])) != 0 &&
        std::isxdigit(static_cast<unsigned char>(text[i + 2])) != 0) {
      out += static_cast<char>(std::stoi(std::string(text.substr(i + 1, 2)), nullptr, 16));
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

std::string_view methods_of(std::string_view method) {
  return method == "POST" ? "POST, OPTIONS" : "GET, HEAD, OPTIONS";
}

// The client's own, if it has a name that may stand in a header.
std::string request_id(const HttpRequest& request, int64_t started, uint64_t number) {
  std::string id = header_of(request, "x-request-id");
  const bool plain = !id.empty() && id.size() <= 128 && std::all_of(id.begin(), id.end(), [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_' || c == '.';
  });
  return plain ? id : fmt::format("req-{}-{}", started, number);
}

}  // namespace

struct Service::Route {
  std::string_view method, path;
  void (Service::*run)(const Exchange&);
  bool open_to_all = false;  // without a key
  bool queues = false;       // its requests wait for the engine
};

// None where there is no such path.
const Service::Route* Service::find_route(std::string_view path) {
  static const std::vector<Route> all = {
      {"GET", "/", &Service::page, /*open_to_all=*/true},
      {"GET", "/health", &Service::health, /*open_to_all=*/true},
      {"GET", "/metrics", &Service::metrics},
      {"GET", "/v1/models", &Service::models},
      {"GET", kModels, &Service::model},
      {"POST", "/v1/chat/completions", &Service::chat, false, /*queues=*/true},
      {"POST", "/v1/completions", &Service::completions, false, /*queues=*/true},
      {"POST", "/tokenize", &Service::tokenize},
      {"POST", "/detokenize", &Service::detokenize},
  };
  for (const Route& route : all) {
    if (route.path == path || (route.path == kModels && path.starts_with(kModels))) return &route;
  }
  return nullptr;
}

Service::Service(const LoadedModel& model, const EngineOptions& engine, ServiceOptions options)
    : model_(model),
      options_(std::move(options)),
      engine_(model, engine),
      max_sequences_(engine.max_sequences),
      started_(now_s()) {
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
  for (bool more = false;;) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return more || work_ || stopping_; });
      if (stopping_) return;
      work_ = false;
      if (ending_) {
        lock.unlock();
        engine_.end_all("the server is stopping");
      }
    }
    more = engine_.step();
  }
}

void Service::wake() {
  {
    const std::lock_guard lock(mutex_);
    work_ = true;
  }
  changed_.notify_all();
}

void Service::end_all() {
  drain();
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  wake();
}

HttpResponse Service::error_response(const HttpRequest& request, const ApiError& error) const {
  const int status = error.status();
  HttpResponse response{
      .status = status,
      .body = error_body(status, replace_invalid_utf8(error.what()), error.param(), error.code())};
  if (status == 429 || status == 503) response.headers = {{"retry-after", "1"}};
  if (status == 401) response.headers = {{"www-authenticate", "Bearer"}};
  if (status == 405)
    response.headers = {{"allow", std::string(methods_of(find_route(request.path)->method))}};
  return response;
}

Headers Service::common_headers(const HttpRequest& request) {
  Headers headers = origin_headers(request, options_.allowed_origins);
  headers.emplace_back("x-request-id", request_id(request, started_, next_id_++));
  return headers;
}

std::optional<HttpResponse> Service::refusal(const HttpRequest& head) {
  try {
    const Route* found = check_head(head);
    if (!found || !found->queues || !queue_is_full()) return std::nullopt;
    admit();  // tells how full
    return std::nullopt;
  } catch (const ApiError& e) {
    HttpResponse response = error_response(head, e);
    const Headers more = common_headers(head);
    response.headers.insert(response.headers.end(), more.begin(), more.end());
    const Route* known = find_route(head.path);
    metrics_.answers.add(std::string(known ? known->path : "other"), response.status);
    return response;
  }
}

void Service::handle(HttpRequest request, std::shared_ptr<HttpReply> reply) {
  if (reply->gone()) return;  // while the request waited for a thread
  const Route* known = find_route(request.path);
  reply = std::make_shared<OuterReply>(std::move(reply), common_headers(request),
                                       std::string(known ? known->path : "other"), metrics_);
  try {
    route(request, reply);
  } catch (const ClientGone&) {
  } catch (const ApiError& e) {
    reply->send(error_response(request, e));
  } catch (const std::exception& e) {
    log_warn("serve: {} {}: {}", request.method, request.path, e.what());
    reply->send(error_response(request, ApiError(500, "an internal fault")));
  }
}

void Service::check_key(const HttpRequest& request) const {
  if (options_.api_key.empty()) return;
  const std::string given = header_of(request, "authorization");
  constexpr size_t kScheme = 7;  // "Bearer ", in whatever case
  if (lower_case(given.substr(0, kScheme)) != "bearer " ||
      !equal_secrets(std::string_view(given).substr(kScheme), options_.api_key))
    throw ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", {}, "invalid_api_key");
}

// Who finds a free place in the engine does not wait: so many more may come.
bool Service::queue_is_full() const {
  const int64_t free = std::max<int64_t>(max_sequences_ - engine_.stats().running, 0);
  return metrics_.waiting >= options_.max_waiting + free;
}

// A place in the queue, or 429.
std::shared_ptr<Ticket> Service::admit() {
  const std::lock_guard lock(admission_);
  if (queue_is_full())
    throw ApiError(429, fmt::format("{} requests are waiting already; try again later", options_.max_waiting),
                   {}, "rate_limit_exceeded");
  return std::make_shared<Ticket>(metrics_);
}

// Refuses what can be refused without the body. None: the request asks what may be asked here.
const Service::Route* Service::check_head(const HttpRequest& request) const {
  const Route* found = find_route(request.path);
  const std::string method = request.method == "HEAD" ? "GET" : request.method;
  if (method == "OPTIONS" && (found || request.path == "*")) return nullptr;
  if (!found || !found->open_to_all) check_key(request);
  if (!found) {
    const std::string below = "/v1" + request.path;
    throw ApiError(404, fmt::format("there is no {}{}", replace_invalid_utf8(request.path),
                                    find_route(below) ? "; did you mean " + below + "?" : ""));
  }
  if (found->method != method) {
    throw ApiError(405, fmt::format("{} is not for {}", replace_invalid_utf8(request.path),
                                    replace_invalid_utf8(request.method)));
  }
  if (method == "POST") {
    check_media_type(request);
    const OriginRules rules{.allowed = options_.allowed_origins,
                            .local_names_only = options_.loopback && options_.api_key.empty()};
    if (is_foreign(request, rules))
      throw ApiError(403, "the page that asks is not of this server; --allow-origin lets it");
  }
  if (found->queues && draining_) throw ApiError(503, "the server is stopping");
  return found;
}

void Service::route(const HttpRequest& request, const std::shared_ptr<HttpReply>& reply) {
  const Route* found = check_head(request);
  if (!found) {
    Headers headers = preflight_headers(request, options_.allowed_origins);
    const Route* asked = find_route(request.path);
    headers.emplace_back("allow", methods_of(asked ? asked->method : "GET"));
    return reply->send({.status = 204, .content_type = "", .headers = std::move(headers)});
  }
  Exchange x{.request = request, .reply = reply, .pictures = std::make_shared<PictureHold>(metrics_)};
  if (found->queues) x.ticket = admit();
  (this->*found->run)(x);
}

void Service::page(const Exchange& x) {
  // The page asks this server and nobody else, and stands in no other page.
  static constexpr const char* kPolicy =
      "default-src 'none'; connect-src 'self'; img-src 'self' data: blob:; style-src 'unsafe-inline'; "
      "script-src 'unsafe-inline'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'";
  x.reply->send({.content_type = "text/html; charset=utf-8",
                 .body = std::string(serve::page()),
                 .headers = {{"content-security-policy", kPolicy},
                             {"x-content-type-options", "nosniff"},
                             {"cache-control", "no-cache"}}});
}

void Service::health(const Exchange& x) {
  if (draining_) return x.reply->send({.status = 503, .body = R"({"status":"stopping"})"});
  x.reply->send({.body = R"({"status":"ok"})"});
}

void Service::metrics(const Exchange& x) {
  x.reply->send({.content_type = "text/plain; version=0.0.4", .body = metrics_.text(engine_.stats())});
}

Json Service::model_json() const {
  return {{"id", options_.model_name},
          {"object", "model"},
          {"created", started_},
          {"owned_by", "godwit"},
          {"max_model_len", engine_.max_context()},
          {"vision", model_.weights.vision.has_value()}};
}

void Service::models(const Exchange& x) {
  x.reply->send({.body = to_text({{"object", "list"}, {"data", Json::array({model_json()})}})});
}

void Service::model(const Exchange& x) {
  check_model({{"model", percent_decoded(std::string_view(x.request.path).substr(kModels.size()))}});
  x.reply->send({.body = to_text(model_json())});
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
                   "model", "model_not_found");
}

}  // namespace godwit::serve
