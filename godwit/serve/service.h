// `godwit serve`: an engine behind an OpenAI-style API.
//
//   POST /v1/chat/completions   POST /v1/completions   GET /v1/models
//   POST /tokenize   POST /detokenize   GET /health   GET /metrics   GET / (a page to talk to the model)
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "godwit/infer/engine.h"
#include "godwit/serve/http.h"
#include "godwit/serve/metrics.h"
#include "godwit/serve/protocol.h"
#include "godwit/text/token_filter.h"

namespace godwit::serve {

struct ServiceOptions {
  std::string model_name;            // as clients see it
  std::string api_key = {};          // empty: none is asked for
  int64_t max_waiting = 256;         // queued requests, beyond which new ones get 429
  std::string image_directory = {};  // whose files image_url may name ("file:..."); empty: none
};

class Service {
 public:
  Service(const LoadedModel& model, const EngineOptions& engine, ServiceOptions options);
  ~Service();
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  // An HttpHandler; may be called from several threads.
  void handle(HttpRequest request, std::shared_ptr<HttpReply> reply);

  EngineStats stats() const { return engine_.stats(); }

 private:
  void route(const HttpRequest& request, const std::shared_ptr<HttpReply>& reply);
  void chat(const HttpRequest& request, const std::shared_ptr<HttpReply>& reply);
  void completions(const HttpRequest& request, const std::shared_ptr<HttpReply>& reply);
  void tokenize(const HttpRequest& request, HttpReply& reply) const;
  void detokenize(const HttpRequest& request, HttpReply& reply) const;
  void check_model(const Json& body) const;
  void check_key(const HttpRequest& request) const;
  MediaList pictures(std::vector<ChatMessage>& messages) const;
  std::shared_ptr<const TokenTrie> trie();
  std::vector<std::shared_ptr<std::atomic<bool>>> constrain(const ChatRequest& chat, Request& request);
  void submit(std::vector<Request> requests, const std::shared_ptr<HttpReply>& reply);
  void run_engine();
  void wake();

  const LoadedModel& model_;
  ServiceOptions options_;
  Engine engine_;
  Metrics metrics_;
  int64_t started_ = 0;  // seconds since the epoch
  std::atomic<uint64_t> next_id_ = 1;
  std::once_flag trie_made_;
  std::shared_ptr<const TokenTrie> trie_;
  std::mutex mutex_;  // of work_
  std::condition_variable changed_;
  bool work_ = false, stopping_ = false;
  std::thread thread_;
};

}  // namespace godwit::serve
