// `godwit serve`: the model over HTTP.
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <mutex>
#include <thread>

#include "godwit/base/check.h"
#include "godwit/base/log.h"
#include "godwit/cli/commands.h"
#include "godwit/cli/memory.h"
#include "godwit/cli/support.h"
#include "godwit/serve/service.h"

namespace godwit::cli {
namespace {

// New requests are refused, running ones may end until the time is over or another signal comes, what is left
// then ends with an error.
void stop(serve::Service& service, serve::HttpServer& server, const sigset_t& signals, double seconds) {
  using Clock = std::chrono::steady_clock;
  service.drain();
  const auto open = service.open_requests();
  log_info("serve: stopping{}",
           open > 0 ? fmt::format(": {} requests have {} s to end (a second signal ends them)", open, seconds)
                    : "");
  const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
  constexpr timespec kLook{.tv_sec = 0, .tv_nsec = 20'000'000};
  while (service.open_requests() > 0 && Clock::now() < deadline) {
    if (sigtimedwait(&signals, nullptr, &kLook) > 0) break;
  }
  service.end_all();
  server.stop_when_written(std::chrono::seconds(2));
}

// A thread that waits for signals: one while the model is loaded ends the program, later ones stop the
// server.
class SignalWaiter {
 public:
  SignalWaiter(const sigset_t& signals, double seconds)
      : signals_(signals), seconds_(seconds), thread_([this] { wait(); }) {}
  ~SignalWaiter() { end(); }
  SignalWaiter(const SignalWaiter&) = delete;
  SignalWaiter& operator=(const SignalWaiter&) = delete;

  void guard(serve::Service& service, serve::HttpServer& server) {
    const std::lock_guard lock(mutex_);
    service_ = &service;
    server_ = &server;
  }
  // No signal is waited for any more, and what it stopped is no longer touched.
  void end() {
    if (!thread_.joinable()) return;
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    pthread_kill(thread_.native_handle(), SIGTERM);
    thread_.join();
  }

 private:
  void wait() {
    int signal = 0;
    sigwait(&signals_, &signal);
    {
      const std::lock_guard lock(mutex_);
      if (over_) return;
      if (!server_) std::_Exit(128 + signal);
    }
    stop(*service_, *server_, signals_, seconds_);
  }

  sigset_t signals_;
  double seconds_;
  std::mutex mutex_;
  serve::Service* service_ = nullptr;
  serve::HttpServer* server_ = nullptr;
  bool over_ = false;
  std::thread thread_;
};

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

// Loads the model and serves it until a signal stops it.
void serve_model(const ServeArgs& args, SignalWaiter& waiter) {
  check(args.max_context != 1, "--max-context 1 leaves no room for an answer");
  const ModelArgs model_args{
      .model = args.model, .dtype = args.dtype, .weights = args.weights, .device = args.device};
  const LoadedModel model = load(model_args);
  const auto path = std::filesystem::absolute(args.model).lexically_normal();
  const std::string name =
      !args.name.empty() ? args.name : (path.has_filename() ? path : path.parent_path()).filename().string();
  const char* key = std::getenv("GODWIT_API_KEY");
  EngineOptions options{.max_sequences = args.max_sequences,
                        .max_context = args.max_context,
                        .cache_tokens = args.cache_tokens,
                        .prefill_tokens = args.prefill_tokens,
                        .draft_tokens = args.draft_tokens,
                        .fp8_latents = args.fp8_latents,
                        .deterministic = args.deterministic,
                        .max_wait_s = args.max_wait,
                        .memory_bytes = memory_budget(model.device)};
  if (args.host_cache > 0) options.prefix.host_bytes = args.host_cache;
  auto service =
      std::make_unique<serve::Service>(model, options,
                                       serve::ServiceOptions{.model_name = name,
                                                             .api_key = key ? key : "",
                                                             .max_waiting = args.max_waiting,
                                                             .image_directory = args.image_dir,
                                                             .allowed_origins = args.allowed_origins,
                                                             .loopback = is_loopback(args.host)});

  const auto refusal = [&](const serve::HttpRequest& head) { return service->refusal(head); };
  serve::HttpServer server({.host = args.host,
                            .port = static_cast<uint16_t>(args.port),
                            .check_head = refusal,
                            .on_refusal = [&](int status) { service->count_refusal(status); }},
                           [&](serve::HttpRequest request, std::shared_ptr<serve::HttpReply> reply) {
                             service->handle(std::move(request), std::move(reply));
                           });
  waiter.guard(*service, server);
  const auto end = [&] {
    waiter.end();
    service.reset();  // before the server: answers hold on to it
  };
  try {
    print_out("{} on http://{}:{}/ (API under /v1, Ctrl-C ends)\n", name,
              args.host.find(':') == args.host.npos ? args.host : "[" + args.host + "]", server.port());
    server.run();
  } catch (...) {
    end();
    throw;
  }
  end();
}

}  // namespace

int run_serve(const ServeArgs& args) {
  // Signals go to one thread that stops the server; every thread made from here on leaves them alone.
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : {SIGINT, SIGTERM}) sigaddset(&signals, signal);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  SignalWaiter waiter(signals, args.shutdown_timeout);
  serve_model(args, waiter);
  return 0;
}

}  // namespace godwit::cli
