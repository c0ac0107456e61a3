// `godwit serve`: an engine behind an OpenAI-style API.
//
//   POST /v1/chat/completions   POST /v1/completions   GET /v1/models   GET /v1/models/{id}
//   POST /tokenize   POST /detokenize   GET /health   GET /metrics   GET / (a page to talk to the model)
//
// What is cheap comes first: key, media type, whether the server is stopping, a place in the queue; then the
// body, its keys and values; then pictures and text, which are given up when the client goes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "godwit/infer/engine.h"
#include "godwit/serve/http.h"
#include "godwit/serve/metrics.h"
#include "godwit/serve/outer_reply.h"
#include "godwit/serve/protocol.h"
#include "godwit/serve/ticket.h"
#include "godwit/text/token_filter.h"

namespace godwit::serve {

struct ServiceOptions {
  std::string model_name;                         // as clients see it
  std::string api_key = {};                       // empty: none is asked for
  int64_t max_waiting = 256;                      // requests in the queue, beyond which new ones get 429
  std::string image_directory = {};               // whose files image_url may name ("file:..."); empty: none
  std::vector<std::string> allowed_origins = {};  // of pages that may ask and read answers; "*": all
  bool loopback = false;                          // reachable from this machine alone
};

class Service {
 public:
  Service(const LoadedModel& model, const EngineOptions& engine, ServiceOptions options);
  ~Service();
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  // An HttpHandler; may be called from several threads.
  void handle(HttpRequest request, std::shared_ptr<HttpReply> reply);
  // A HeadCheck: what can be refused without the body.
  std::optional<HttpResponse> refusal(const HttpRequest& head);

  // For what the HTTP layer refuses itself.
  void count_refusal(int status) { metrics_.answers.add("none", status); }

  // From here on new requests get 503, and /health says so. Those that are there go on.
  void drain() { draining_ = true; }
  // Requests that are not answered yet.
  int64_t open_requests() const { return metrics_.waiting + metrics_.running; }
  // Ends them all: an error, in a stream an error event.
  void end_all();

  EngineStats stats() const { return engine_.stats(); }

 private:
  // A request, its answer and, if it wants tokens, its place in the queue.
  struct Exchange {
    const HttpRequest& request;
    std::shared_ptr<HttpReply> reply;
    std::shared_ptr<Ticket> ticket = {};
    std::shared_ptr<PictureHold> pictures;
  };
  struct Route;
  static const Route* find_route(std::string_view path);

  const Route* check_head(const HttpRequest& request) const;
  bool queue_is_full() const;
  void route(const HttpRequest& request, const std::shared_ptr<HttpReply>& reply);
  HttpResponse error_response(const HttpRequest& request, const ApiError& error) const;
  Headers common_headers(const HttpRequest& request);
  void page(const Exchange& x);
  void health(const Exchange& x);
  void metrics(const Exchange& x);
  void models(const Exchange& x);
  void model(const Exchange& x);
  void chat(const Exchange& x);
  void completions(const Exchange& x);
  void tokenize(const Exchange& x);
  void detokenize(const Exchange& x);

  Json model_json() const;
  void check_model(const Json& body) const;
  void check_key(const HttpRequest& request) const;
  std::shared_ptr<Ticket> admit();
  PromptReader reader(const Exchange& x, const char* param) const;
  MediaList pictures(std::vector<ChatMessage>& messages, HttpReply& reply, PictureHold& hold) const;
  std::shared_ptr<const TokenTrie> trie();
  std::vector<std::shared_ptr<std::atomic<bool>>> constrain(const ChatRequest& chat, Request& request);
  void submit(const Exchange& x, std::vector<Request> requests, const char* param);
  void run_engine();
  void wake();

  const LoadedModel& model_;
  ServiceOptions options_;
  Metrics metrics_;  // before the engine, whose requests count themselves out
  Engine engine_;
  int64_t max_sequences_ = 0;
  int64_t started_ = 0;  // seconds since the epoch
  std::atomic<uint64_t> next_id_ = 1;
  std::atomic<bool> draining_ = false;
  std::mutex admission_;  // one request at a time takes its place in the queue
  std::once_flag trie_made_;
  std::shared_ptr<const TokenTrie> trie_;
  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  bool work_ = false, stopping_ = false, ending_ = false;
  std::thread thread_;
};

}  // namespace godwit::serve
