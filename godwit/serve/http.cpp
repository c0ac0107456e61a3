#include "godwit/serve/http.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/experimental/awaitable_operators.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "godwit/base/check.h"
#include "godwit/base/log.h"

namespace godwit::serve {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;
using boost::system::error_code;
using Stream = beast::tcp_stream;

const auto kAwait = asio::use_awaitable;

std::string status_line(int status) {
  return fmt::format("HTTP/1.1 {} {}\r\n", status,
                     std::string(http::obsolete_reason(static_cast<http::status>(status))));
}

// What waits to be written to one client, and whether it is still there.
class Reply final : public HttpReply, public std::enable_shared_from_this<Reply> {
 public:
  struct Form {
    bool keep_alive, chunked, head_only;
  };
  Reply(const asio::any_io_executor& executor, const HttpOptions& options, Form form)
      : executor_(executor),
        changed_(executor),
        deadline_(std::chrono::steady_clock::now() + options.total_timeout),
        max_unread_(options.max_unread),
        form_(form) {
    changed_.expires_at(deadline_);
  }

  void send(HttpResponse response) override {
    std::string head = head_of(response);
    if (response.status != 204) head += fmt::format("content-length: {}\r\n", response.body.size());
    head += "\r\n";
    push(form_.head_only ? head : head + response.body, /*last=*/true);
  }

  void begin(HttpResponse head) override {
    streaming_ = true;
    push(head_of(head) + (form_.chunked ? "transfer-encoding: chunked\r\n\r\n" : "\r\n"), /*last=*/false);
  }

  bool write(std::string_view data) override {
    if (data.empty() || form_.head_only) return !gone();
    return push(form_.chunked ? fmt::format("{:x}\r\n{}\r\n", data.size(), data) : std::string(data),
                /*last=*/false);
  }

  void end() override { push(form_.chunked && !form_.head_only ? "0\r\n\r\n" : "", /*last=*/true); }

  void on_gone(std::function<void()> callback) override {
    {
      const std::lock_guard lock(mutex_);
      if (!gone_) {
        if (!ended_) on_gone_ = std::move(callback);
        return;
      }
    }
    callback();
  }

  bool gone() override {
    const std::lock_guard lock(mutex_);
    return gone_;
  }

  // For the connection.
  void leave() {
    std::function<void()> callback;
    {
      const std::lock_guard lock(mutex_);
      if (gone_) return;
      gone_ = true;
      waiting_.clear();
      callback.swap(on_gone_);
    }
    if (callback) callback();
    notify();
  }
  // Takes what waits; `complete` when nothing follows.
  std::string take(bool& complete) {
    const std::lock_guard lock(mutex_);
    std::string all;
    for (std::string& part : waiting_) all += part;
    waiting_.clear();
    bytes_ = 0;
    complete = ended_ || gone_;
    return all;
  }
  // Until something is pushed, or the time for the answer is over.
  asio::awaitable<void> wait_for_change() {
    error_code ignored;
    co_await changed_.async_wait(asio::redirect_error(kAwait, ignored));
  }
  [[nodiscard]] std::chrono::steady_clock::time_point deadline() const { return deadline_; }
  [[nodiscard]] bool keeps_alive() const { return form_.keep_alive && (form_.chunked || !streaming_); }
  bool ended() {
    const std::lock_guard lock(mutex_);
    return ended_;
  }

 private:
  std::string head_of(const HttpResponse& r) const {
    std::string head = status_line(r.status);
    if (!r.content_type.empty()) head += fmt::format("content-type: {}\r\n", r.content_type);
    for (const auto& [name, value] : r.headers) head += fmt::format("{}: {}\r\n", name, value);
    head += keeps_alive() ? "connection: keep-alive\r\n" : "connection: close\r\n";
    return head;
  }

  bool push(std::string data, bool last) {
    bool stalled = false;
    {
      const std::lock_guard lock(mutex_);
      if (gone_ || ended_) return false;
      bytes_ += static_cast<int64_t>(data.size());
      stalled = !last && bytes_ > max_unread_;
      if (!stalled) {
        waiting_.push_back(std::move(data));
        ended_ = last;
        if (last) on_gone_ = {};
      }
    }
    if (stalled) leave();
    notify();
    return !stalled;
  }

  // Wakes the connection, on its own thread: the timer is not to be touched from another.
  void notify() {
    asio::post(executor_, [weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->changed_.cancel();
    });
  }

  asio::any_io_executor executor_;
  asio::steady_timer changed_;
  std::chrono::steady_clock::time_point deadline_;
  int64_t max_unread_;
  Form form_;
  std::atomic<bool> streaming_ = false;
  std::mutex mutex_;
  std::deque<std::string> waiting_;
  int64_t bytes_ = 0;
  bool ended_ = false, gone_ = false;
  std::function<void()> on_gone_;
};

// What handlers hold. When the last of them lets go of an unfinished answer, the client is told.
class Handle final : public HttpReply {
 public:
  explicit Handle(std::shared_ptr<Reply> reply) : reply_(std::move(reply)) {}
  ~Handle() override {
    if (began_) {
      if (!reply_->ended()) reply_->leave();
    } else if (!reply_->ended()) {
      reply_->send({.status = 500,
                    .body = R"({"error":{"message":"the request was dropped","type":"server_error"}})"});
    }
  }
  void send(HttpResponse response) override { reply_->send(std::move(response)); }
  void begin(HttpResponse head) override {
    began_ = true;
    reply_->begin(std::move(head));
  }
  bool write(std::string_view data) override { return reply_->write(data); }
  void end() override { reply_->end(); }
  void on_gone(std::function<void()> callback) override { reply_->on_gone(std::move(callback)); }
  bool gone() override { return reply_->gone(); }

 private:
  std::shared_ptr<Reply> reply_;
  std::atomic<bool> began_ = false;
};

HttpRequest head_of(const http::request<http::string_body>& message) {
  HttpRequest out;
  out.method = std::string(message.method_string());
  const std::string target(message.target());
  // A proxy may send the whole address: http://host/path.
  size_t begin = 0;
  if (const size_t scheme = target.find("://"); scheme != target.npos && target[0] != '/')
    begin = std::min(target.find('/', scheme + 3), target.size());
  out.path = target.substr(begin, target.find('?') - begin);
  if (out.path.empty()) out.path = "/";
  for (const auto& field : message) {
    std::string name(field.name_string());
    for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    out.headers[name] = std::string(field.value());
  }
  return out;
}

HttpRequest to_request(http::request<http::string_body>&& message) {
  HttpRequest out = head_of(message);
  out.body = std::move(message.body());
  return out;
}

// Ends what a socket waits for when the time is over. The stream's own time-out would close the socket, and
// the client could no longer be told.
class ReadLimit {
 public:
  ReadLimit(tcp::socket& socket, std::chrono::seconds time)
      : timer_(socket.get_executor(), time), state_(std::make_shared<State>(State{.socket = &socket})) {
    timer_.async_wait([state = state_](const error_code& ec) {
      if (ec || !state->socket) return;
      state->over = true;
      state->socket->cancel();
    });
  }
  ~ReadLimit() { state_->socket = nullptr; }
  ReadLimit(const ReadLimit&) = delete;
  ReadLimit& operator=(const ReadLimit&) = delete;
  [[nodiscard]] bool over() const { return state_->over; }

 private:
  struct State {
    tcp::socket* socket;  // null once nothing is waited for
    bool over = false;
  };
  asio::steady_timer timer_;
  std::shared_ptr<State> state_;
};

// True when the other side has closed: readable, and nothing to read.
bool closed_by_peer(tcp::socket& socket) {
  char byte = 0;
  error_code ec;
  socket.non_blocking(true, ec);
  const size_t n = socket.receive(asio::buffer(&byte, 1), tcp::socket::message_peek, ec);
  return ec ? ec != asio::error::would_block : n == 0;
}

// Counts a connection for as long as its coroutine lives, however that ends.
class Counted {
 public:
  explicit Counted(std::atomic<int64_t>& count) : count_(count) { ++count_; }
  ~Counted() { --count_; }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

 private:
  std::atomic<int64_t>& count_;
};

// What one request holds of the memory for large bodies. Given back when it is destroyed.
class HeldBytes {
 public:
  explicit HeldBytes(std::atomic<int64_t>& total) : total_(total) {}
  ~HeldBytes() { release(); }
  HeldBytes(const HeldBytes&) = delete;
  HeldBytes& operator=(const HeldBytes&) = delete;
  // False, and nothing is held any more, when all requests together would hold more than `most`.
  bool grow(int64_t bytes, int64_t most) {
    total_ += bytes - bytes_;
    bytes_ = bytes;
    if (total_ <= most) return true;
    release();
    return false;
  }
  void release() { total_ -= std::exchange(bytes_, 0); }

 private:
  std::atomic<int64_t>& total_;
  int64_t bytes_ = 0;
};

using Message = http::request<http::string_body>;

struct Incoming {
  Message message;
  std::shared_ptr<HeldBytes> held;
};

// What a connection may hold of a request beyond its head: the parser takes a chunk's line and the trailers
// only when they are whole, and neither the header's limit nor the body's counts them.
constexpr int64_t kMoreThanHeader = 16 << 10;

}  // namespace

struct HttpServer::Impl {
  Impl(const HttpOptions& o, HttpHandler h)
      : options(o),
        handler(std::move(h)),
        bodiless(o.handler_threads),
        small(o.handler_threads),
        large(o.handler_threads),
        acceptor(io) {}

  HttpOptions options;
  HttpHandler handler;
  // Before the context, which ends the connections' coroutines: connections, those of them that have a
  // request, bytes of large bodies.
  std::atomic<int64_t> open = 0, answering = 0, bodies = 0;
  uint64_t refused = 0;
  asio::io_context io{1};
  asio::thread_pool bodiless, small, large;  // lanes
  tcp::acceptor acceptor;

  asio::awaitable<void> accept_all() {
    for (;;) {
      error_code ec;
      tcp::socket socket = co_await acceptor.async_accept(asio::redirect_error(kAwait, ec));
      if (ec == asio::error::operation_aborted || !acceptor.is_open()) co_return;
      if (ec) {  // no descriptor left, say: wait for one
        asio::steady_timer pause(io, std::chrono::milliseconds(50));
        co_await pause.async_wait(asio::redirect_error(kAwait, ec));
        continue;
      }
      asio::co_spawn(io, connection(Stream(std::move(socket))), [](const std::exception_ptr& error) {
        if (!error) return;
        try {
          std::rethrow_exception(error);
        } catch (const std::exception& e) {
          log_warn("http: a connection ended: {}", e.what());
        }
      });
    }
  }

  void join() {
    for (asio::thread_pool* lane : {&bodiless, &small, &large}) lane->join();
  }

  asio::thread_pool& lane_of(const Message& message) {
    const auto size = static_cast<int64_t>(message.body().size());
    return size == 0 ? bodiless : size <= options.large_body ? small : large;
  }

  // Writes an error and closes: for requests that never reach a handler.
  asio::awaitable<void> refuse(Stream& stream, int status, std::string_view message) {
    HttpResponse response{
        .status = status,
        .body = fmt::format(R"({{"error":{{"message":"{}","type":"{}","param":null,"code":null}}}})", message,
                            status < 500 ? "invalid_request_error" : "server_error"),
        .headers = {{"x-request-id", fmt::format("refused-{}", ++refused)}}};
    if (status == 503) response.headers.emplace_back("retry-after", "1");
    if (options.on_refusal) options.on_refusal(status);
    co_await answer_and_close(stream, response);
  }

  asio::awaitable<void> answer_and_close(Stream& stream, const HttpResponse& response) {
    std::string text = status_line(response.status);
    text += fmt::format("content-type: {}\r\nconnection: close\r\n", response.content_type);
    for (const auto& [name, value] : response.headers) text += fmt::format("{}: {}\r\n", name, value);
    text += fmt::format("content-length: {}\r\n\r\n{}", response.body.size(), response.body);
    error_code ec;
    stream.expires_after(options.write_timeout);
    co_await asio::async_write(stream, asio::buffer(text), asio::redirect_error(kAwait, ec));
    // What the client still sends is read and dropped for a moment, or its stack would discard our answer.
    stream.socket().shutdown(tcp::socket::shutdown_send, ec);
    stream.expires_after(std::chrono::seconds(2));
    std::vector<char> rest(1 << 16);
    for (int i = 0; i < 64 && !ec; ++i)
      co_await stream.async_read_some(asio::buffer(rest), asio::redirect_error(kAwait, ec));
  }

  // Until a request begins. Empty lines before it are nothing (RFC 9112, 2.2). False when none comes.
  asio::awaitable<bool> begin(Stream& stream, beast::flat_buffer& buffer, std::chrono::seconds time) {
    stream.expires_after(time);
    std::array<char, 4096> begun;
    for (error_code ec; !ec;) {
      const auto text = [&] {
        return std::string_view(static_cast<const char*>(buffer.data().data()), buffer.size());
      };
      while (text().starts_with("\r\n")) buffer.consume(2);
      if (!text().empty() && text() != "\r") co_return true;
      const size_t n = co_await stream.async_read_some(asio::buffer(begun), asio::redirect_error(kAwait, ec));
      buffer.commit(asio::buffer_copy(buffer.prepare(n), asio::buffer(begun, n)));
    }
    co_return false;
  }

  // Reads a body into the parser. False when there is no memory for it.
  asio::awaitable<bool> read_body(Stream& stream, beast::flat_buffer& buffer,
                                  http::request_parser<http::string_body>& parser, HeldBytes& held,
                                  error_code& ec) {
    if (beast::iequals(parser.get()[http::field::expect], "100-continue")) {
      static constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
      co_await asio::async_write(stream, asio::buffer(kContinue), asio::redirect_error(kAwait, ec));
    }
    while (!ec && !parser.is_done()) {
      co_await http::async_read_some(stream, buffer, parser, asio::redirect_error(kAwait, ec));
      const auto size = static_cast<int64_t>(parser.get().body().size());
      if (size > options.large_body && !held.grow(size, options.max_bodies)) co_return false;
    }
    co_return true;
  }

  // What is wrong with a head that the parser takes; empty: nothing.
  static std::string_view fault_of(const http::request_parser<http::string_body>& parser) {
    const auto& head = parser.get();
    if (head.version() >= 11 && head.count(http::field::host) == 0) return "the request has no Host header";
    const auto coding = head.find(http::field::transfer_encoding);
    if (coding != head.end() && !beast::iequals(coding->value(), "chunked"))
      return "no other transfer-encoding than chunked is supported";
    return {};
  }

  // More bytes to come than a small body has, or an unknown number.
  bool has_large_body(const http::request_parser<http::string_body>& parser) const {
    const auto length = parser.content_length();
    return !parser.is_done() && (!length || *length > static_cast<uint64_t>(options.large_body));
  }

  // Reads one request; none when the connection is over.
  asio::awaitable<std::optional<Incoming>> read(Stream& stream, beast::flat_buffer& buffer, bool first) {
    http::request_parser<http::string_body> parser;
    parser.body_limit(static_cast<uint64_t>(options.max_body));
    parser.header_limit(static_cast<uint32_t>(options.max_header));
    const auto held = std::make_shared<HeldBytes>(bodies);
    error_code ec;
    if (!co_await begin(stream, buffer, first ? options.read_timeout : options.idle_timeout))
      co_return std::nullopt;
    stream.expires_never();
    bool late = false, room = true;
    {
      const ReadLimit limit(stream.socket(), options.read_timeout);
      co_await http::async_read_header(stream, buffer, parser, asio::redirect_error(kAwait, ec));
      late = limit.over();
    }
    if (!ec) {
      const std::string_view fault = fault_of(parser);
      if (!fault.empty()) {
        co_await refuse(stream, 400, fault);
        co_return std::nullopt;
      }
    }
    if (!ec && options.check_head && has_large_body(parser)) {
      if (const auto answer = options.check_head(head_of(parser.get()))) {
        co_await answer_and_close(stream, *answer);
        co_return std::nullopt;
      }
    }
    if (!ec) {
      const ReadLimit limit(stream.socket(), options.read_timeout);
      room = co_await read_body(stream, buffer, parser, *held, ec);
      late = limit.over();
    }
    if (!room) {
      co_await refuse(stream, 503, "too many large requests at once; try again later");
      co_return std::nullopt;
    }
    if (!ec) co_return Incoming{parser.release(), held};
    const bool begun = buffer.size() > 0 || parser.got_some() || parser.is_header_done();
    co_await refuse_unread(stream, ec, late, begun);
    co_return std::nullopt;
  }

  // Says what was wrong with a request that could not be read, if that is the client's doing.
  asio::awaitable<void> refuse_unread(Stream& stream, error_code ec, bool late, bool begun) {
    if (ec == http::error::body_limit) {
      co_await refuse(stream, 413, fmt::format("the body is larger than {} bytes", options.max_body));
    } else if (ec == http::error::header_limit) {
      co_await refuse(stream, 431, fmt::format("the headers are larger than {} bytes", options.max_header));
    } else if (ec == http::error::buffer_overflow) {
      co_await refuse(stream, 400, "a line of the request or its trailers are too large");
    } else if (late) {
      if (begun) co_await refuse(stream, 408, "the request did not arrive in time");
    } else if (ec.category() == make_error_code(http::error::bad_method).category() &&
               ec != http::error::end_of_stream && ec != http::error::partial_message) {
      co_await refuse(stream, 400, "this is no valid HTTP/1.1 request");
    }
  }

  // Writes the answer as it comes. False when the client has gone.
  asio::awaitable<bool> pump(Stream& stream, beast::flat_buffer& buffer,
                             const std::shared_ptr<Reply>& reply) {
    using namespace asio::experimental::awaitable_operators;
    bool watch = true, late = false, wrote = false;
    for (;;) {
      bool complete = false;
      const std::string data = reply->take(complete);
      error_code ec;
      if (!data.empty()) {
        wrote = true;
        const auto now = std::chrono::steady_clock::now();
        stream.expires_at(std::min(now + options.write_timeout, std::max(now, reply->deadline())));
        co_await asio::async_write(stream, asio::buffer(data), asio::redirect_error(kAwait, ec));
        stream.expires_never();
        if (ec) break;
        if (!complete) continue;
      }
      if (complete) co_return !reply->gone();
      late = std::chrono::steady_clock::now() >= reply->deadline();
      if (late) break;
      if (!watch) {
        co_await reply->wait_for_change();
        continue;
      }
      const auto woke =
          co_await (reply->wait_for_change() ||
                    stream.socket().async_wait(tcp::socket::wait_read, asio::redirect_error(kAwait, ec)));
      if (woke.index() == 1) {
        if (ec || closed_by_peer(stream.socket())) break;
        // The next request, or a part of it: kept, so that the end behind it is seen too.
        const size_t room = std::min<size_t>(buffer.max_size() - buffer.size(), 4096);
        watch = room > 0;
        if (!watch) continue;
        buffer.commit(stream.socket().read_some(buffer.prepare(room), ec));
        if (ec) break;
      }
    }
    reply->leave();
    if (late && !wrote)
      co_await refuse(stream, 504,
                      fmt::format("the answer was not there after {} s", options.total_timeout.count()));
    co_return false;
  }

  asio::awaitable<void> connection(Stream stream) {
    const Counted counted(open);
    if (open > options.max_connections) {
      co_await refuse(stream, 503, "too many connections");
      co_return;
    }
    error_code ec;
    stream.socket().set_option(tcp::no_delay(true), ec);
    beast::flat_buffer buffer(static_cast<size_t>(options.max_header + kMoreThanHeader));
    for (bool first = true;; first = false) {
      auto incoming = co_await read(stream, buffer, first);
      if (!incoming) break;
      const Counted busy(answering);
      stream.expires_never();
      const Message& message = incoming->message;
      const auto reply =
          std::make_shared<Reply>(stream.get_executor(), options,
                                  Reply::Form{.keep_alive = message.keep_alive(),
                                              .chunked = message.version() >= 11,
                                              .head_only = message.method() == http::verb::head});
      asio::thread_pool& lane = lane_of(message);
      asio::post(lane,
                 [this, request = to_request(std::move(incoming->message)), held = std::move(incoming->held),
                  handle = std::make_shared<Handle>(reply)]() mutable {
                   try {
                     handler(std::move(request), std::move(handle));
                   } catch (const std::exception& e) {
                     log_warn("http: a handler failed: {}", e.what());
                   }
                 });
      if (!co_await pump(stream, buffer, reply) || !reply->keeps_alive()) break;
    }
    stream.socket().shutdown(tcp::socket::shutdown_both, ec);
  }
};

HttpServer::HttpServer(const HttpOptions& options, HttpHandler handler)
    : impl_(std::make_unique<Impl>(options, std::move(handler))) {
  error_code ec;
  const auto address = asio::ip::make_address(options.host == "localhost" ? "127.0.0.1" : options.host, ec);
  check(!ec, "serve: {} is no IP address", options.host);
  const tcp::endpoint endpoint(address, options.port);
  auto& acceptor = impl_->acceptor;
  acceptor.open(endpoint.protocol(), ec);
  if (!ec) acceptor.set_option(asio::socket_base::reuse_address(true), ec);
  if (!ec) acceptor.bind(endpoint, ec);
  if (!ec) acceptor.listen(1024, ec);
  check(!ec, "serve: cannot listen on {}:{}: {}", options.host, options.port, ec.message());
}

HttpServer::~HttpServer() {
  stop();
  impl_->join();
}

uint16_t HttpServer::port() const {
  return impl_->acceptor.local_endpoint().port();
}

int64_t HttpServer::connections() const {
  return impl_->open;
}

void HttpServer::run() {
  asio::co_spawn(impl_->io, impl_->accept_all(), asio::detached);
  for (;;) {
    try {
      impl_->io.run();
      break;
    } catch (const std::exception& e) {  // the parser's, say: its connection is closed, the others go on
      log_warn("http: a connection ended: {}", e.what());
    }
  }
  impl_->join();  // no handler runs any more
}

void HttpServer::stop() {
  impl_->io.stop();
}

void HttpServer::stop_when_written(std::chrono::milliseconds time) {
  asio::post(impl_->io, [this] {
    error_code ignored;
    impl_->acceptor.close(ignored);
  });
  const auto deadline = std::chrono::steady_clock::now() + time;
  while (impl_->answering > 0 && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  stop();
}

}  // namespace godwit::serve
