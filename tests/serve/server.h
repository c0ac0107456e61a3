// A server in this process, on a free port.
#pragma once

#include <ATen/ATen.h>

#include <chrono>
#include <memory>
#include <thread>

#include "godwit/serve/service.h"
#include "tests/infer/bigram.h"

namespace godwit::testing {

class Server {
 public:
  explicit Server(LoadedModel model, serve::ServiceOptions options = {.model_name = "tiny"},
                  EngineOptions engine = {.max_sequences = 8, .max_context = 1024},
                  serve::HttpOptions http = {})
      : model_(std::move(model)) {
    http.port = 0;
    http.check_head = [this](const serve::HttpRequest& head) { return service_->refusal(head); };
    http.on_refusal = [this](int status) { service_->count_refusal(status); };
    service_ = std::make_unique<serve::Service>(model_, engine, std::move(options));
    server_ = std::make_unique<serve::HttpServer>(
        http, [this](serve::HttpRequest r, std::shared_ptr<serve::HttpReply> reply) {
          service_->handle(std::move(r), std::move(reply));
        });
    thread_ = std::thread([this] { server_->run(); });
  }
  ~Server() {
    server_->stop();
    thread_.join();
    service_.reset();
  }
  uint16_t port() const { return server_->port(); }
  EngineStats stats() const { return service_->stats(); }
  serve::Service& service() { return *service_; }
  // Waits until nothing runs; false after ten seconds.
  bool idle() const {
    for (int i = 0; i < 1000; ++i) {
      const EngineStats s = stats();
      if (s.running == 0 && s.waiting == 0) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return false;
  }

 private:
  LoadedModel model_;
  std::unique_ptr<serve::Service> service_;
  std::unique_ptr<serve::HttpServer> server_;
  std::thread thread_;
};

inline LoadedModel random_model() {
  LoadedModel model = test::bigram_model({});
  model.weights = init_weights(model.config, 5, at::kCPU, at::kFloat);
  return model;
}

// One that takes pictures.
inline LoadedModel seeing_model() {
  LoadedModel model = test::bigram_model({});
  model.config.media_id = model.tokenizer.special_id(kMediaPad);
  model.config.vision = VisionConfig{.patch_size = 14,
                                     .pos_emb_height = 4,
                                     .pos_emb_width = 4,
                                     .layers = 2,
                                     .hidden = 16,
                                     .intermediate = 24,
                                     .heads = 2,
                                     .qkv_hidden = 16};
  model.weights = init_weights(model.config, 5, at::kCPU, at::kFloat);
  return model;
}

}  // namespace godwit::testing
