// HTTP/1.1 with streamed answers: Boost.Beast on Asio coroutines, behind this header. It knows nothing of
// models. One thread serves all connections. Handlers run on threads of their own, in three lanes, so that
// none waits for a slower kind: requests without a body, with a small one and with a large one.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace godwit::serve {

struct HttpRequest {
  std::string method;
  std::string path;                            // without the query
  std::map<std::string, std::string> headers;  // names in lower case
  std::string body;
};

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  std::string body = {};
  std::vector<std::pair<std::string, std::string>> headers = {};
};

// The answer to one request, to be given from any thread: send once, or begin, write any number of times and
// end. If it is destroyed before that, the client gets a 500. To HEAD only what stands above the body is
// sent.
class HttpReply {
 public:
  virtual ~HttpReply() = default;
  virtual void send(HttpResponse response) = 0;
  virtual void begin(HttpResponse head) = 0;
  // False when nobody reads: the client is gone, or reads so slowly that `max_unread` bytes wait for it.
  virtual bool write(std::string_view data) = 0;
  virtual void end() = 0;
  // Called once, from any thread, when the client goes before the answer has ended; at once if it has gone.
  virtual void on_gone(std::function<void()> callback) = 0;
  // Whether it has gone: for work that takes long before anything is written.
  virtual bool gone() = 0;
};

// Looks at a request's head before a body of more than `large_body` bytes, or of unknown length, is read.
// What it gives is the answer, and the connection is closed. Called on the connections' thread: it must be
// quick.
using HeadCheck = std::function<std::optional<HttpResponse>(const HttpRequest& head)>;

struct HttpOptions {
  std::string host = "127.0.0.1";
  uint16_t port = 8080;  // 0: any free one
  int64_t max_body = int64_t{32} << 20;
  int64_t large_body = 64 << 10;            // beyond it a request takes the lane of large ones
  int64_t max_bodies = int64_t{256} << 20;  // of all large bodies that are held at a time
  int64_t max_header = 16 << 10;
  int64_t max_connections = 2048;
  int64_t max_unread = int64_t{4} << 20;
  std::chrono::seconds read_timeout{30};     // for a request to arrive once it has begun
  std::chrono::seconds idle_timeout{75};     // between requests
  std::chrono::seconds write_timeout{30};    // for a client to take anything
  std::chrono::seconds total_timeout{3600};  // from a request's arrival to the end of its answer
  int handler_threads = 2;                   // of each lane
  HeadCheck check_head = {};
  std::function<void(int status)> on_refusal =
      {};  // what the HTTP layer itself answers with an error; be quick
};

using HttpHandler = std::function<void(HttpRequest request, std::shared_ptr<HttpReply> reply)>;

class HttpServer {
 public:
  // Listens at once. Throws Error when the address cannot be had.
  HttpServer(const HttpOptions& options, HttpHandler handler);
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  uint16_t port() const;
  int64_t connections() const;
  void run();   // until stop; no handler runs when it returns. Answers must be let go of before the server is
  void stop();  // from any thread or a signal's; open connections are closed
  // The same once the answers that have ended are written, or the time is over; no new connection is taken.
  void stop_when_written(std::chrono::milliseconds time);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace godwit::serve
