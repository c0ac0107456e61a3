// The HTTP server alone, with handlers that do what a test needs.
#include "godwit/serve/http.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "tests/serve/client.h"

namespace godwit::serve {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::Client;

class Server {
 public:
  Server(HttpOptions options, HttpHandler handler) {
    options.port = 0;
    server_ = std::make_unique<HttpServer>(options, std::move(handler));
    thread_ = std::thread([this] { server_->run(); });
  }
  ~Server() {
    server_->stop();
    thread_.join();
  }
  uint16_t port() const { return server_->port(); }
  // True when no connection is open; waits for five seconds at most.
  bool quiet() const {
    for (int i = 0; i < 500; ++i) {
      if (server_->connections() == 0) return true;
      std::this_thread::sleep_for(milliseconds(10));
    }
    return false;
  }

 private:
  std::unique_ptr<HttpServer> server_;
  std::thread thread_;
};

void echo(HttpRequest request, const std::shared_ptr<HttpReply>& reply) {
  reply->send({.body = request.method + " " + request.path + " " + request.body});
}

// Seconds until the server closes the connection, and what came before.
double seconds_to_close(Client& client, std::string& received) {
  const auto start = std::chrono::steady_clock::now();
  received = client.receive_all();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// An answer that never comes, and a stream that falls silent, end when their time is over, though nothing
// wakes the connection; the handler's side is told.
TEST(Http, TotalTimeEndsWhatFallsSilent) {
  for (const bool streams : {false, true}) {
    std::atomic<int> gone = 0;
    std::shared_ptr<HttpReply> kept;
    {
      Server server({.total_timeout = seconds(1)}, [&](HttpRequest, std::shared_ptr<HttpReply> reply) {
        reply->on_gone([&] { ++gone; });
        if (streams) {
          reply->begin({.content_type = "text/event-stream"});
          reply->write("data: 1\n\n");
        }
        kept = std::move(reply);
      });
      Client client(server.port());
      client.send("GET / HTTP/1.1\r\nhost: x\r\n\r\n");
      std::string received;
      const double took = seconds_to_close(client, received);
      EXPECT_GE(took, 0.9);
      EXPECT_LE(took, 10.0);
      EXPECT_TRUE(received.starts_with(streams ? "HTTP/1.1 200" : "HTTP/1.1 504")) << received;
      EXPECT_EQ(gone, 1);
      EXPECT_FALSE(kept->write("data: 2\n\n"));
      EXPECT_TRUE(server.quiet());
      kept.reset();
    }
  }
}

TEST(Http, AStreamThatGoesOnEndsAtItsTotalTimeToo) {
  std::atomic<bool> stop = false;
  std::thread writer;
  {
    Server server({.total_timeout = seconds(1)}, [&](HttpRequest, std::shared_ptr<HttpReply> reply) {
      reply->begin({.content_type = "text/event-stream"});
      writer = std::thread([&stop, reply = std::move(reply)] {
        while (!stop && reply->write("data: x\n\n")) std::this_thread::sleep_for(milliseconds(5));
        stop = true;
      });
    });
    Client client(server.port());
    client.send("GET / HTTP/1.1\r\nhost: x\r\n\r\n");
    std::string received;
    const double took = seconds_to_close(client, received);
    EXPECT_GE(took, 0.9);
    EXPECT_LE(took, 10.0);
    for (int i = 0; i < 500 && !stop; ++i) std::this_thread::sleep_for(milliseconds(10));
    EXPECT_TRUE(stop) << "the writer was not told";
    stop = true;
    writer.join();
  }
}

TEST(Http, AnIdleConnectionIsClosedAndABusyOneIsNot) {
  Server server({.read_timeout = seconds(5), .idle_timeout = seconds(1)}, echo);
  Client client(server.port());
  for (int i = 0; i < 3; ++i) {
    std::this_thread::sleep_for(milliseconds(500));  // below the limit, and in all above it
    client.send("GET /a HTTP/1.1\r\nhost: x\r\n\r\n");
    EXPECT_NE(client.receive_until("GET /a ").find("GET /a "), std::string::npos) << i;
  }
  std::string received;
  const double took = seconds_to_close(client, received);
  EXPECT_GE(took, 0.9);
  EXPECT_LE(took, 4.0);
  EXPECT_EQ(received, "");
}

// A head or a body that trickles in has the time for one request, on a new connection and on one that is
// kept; the time between requests is not lent to it.
TEST(Http, SlowHeadsAndBodiesAreCutOff) {
  Server server({.read_timeout = seconds(1), .idle_timeout = seconds(60)}, echo);
  for (const bool second : {false, true}) {
    for (const std::string start :
         {"GET / HTTP/1.1\r\nx", "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"}) {
      Client client(server.port());
      if (second) {
        client.send("GET /a HTTP/1.1\r\nhost: x\r\n\r\n");
        client.receive_until("GET /a ");
      }
      client.send(start);
      std::atomic<bool> closed = false;
      std::thread trickle([&] {
        while (!closed) {
          client.send("a");
          std::this_thread::sleep_for(milliseconds(100));
        }
      });
      std::string received;
      const double took = seconds_to_close(client, received);
      closed = true;
      trickle.join();
      EXPECT_TRUE(received.starts_with("HTTP/1.1 408")) << received;
      EXPECT_LE(took, 8.0) << start;
    }
  }
  EXPECT_TRUE(server.quiet());
}

TEST(Http, AReaderWhoTakesNothingIsLetGo) {
  std::atomic<int> gone = 0;
  std::thread writer;
  {
    Server server({.max_unread = 1 << 16, .write_timeout = seconds(1)},
                  [&](HttpRequest, std::shared_ptr<HttpReply> reply) {
                    reply->on_gone([&] { ++gone; });
                    reply->begin({.content_type = "text/plain"});
                    writer = std::thread([reply = std::move(reply)] {
                      const std::string block(1 << 14, 'x');
                      for (int i = 0; i < 10000 && reply->write(block); ++i)
                        std::this_thread::sleep_for(milliseconds(1));
                    });
                  });
    Client client(server.port());
    client.send("GET / HTTP/1.1\r\nhost: x\r\n\r\n");
    for (int i = 0; i < 1000 && gone == 0; ++i) std::this_thread::sleep_for(milliseconds(10));
    EXPECT_EQ(gone, 1);
    EXPECT_TRUE(server.quiet());
    writer.join();
  }
}

// Chunk extensions and trailers count towards neither the header's limit nor the body's.
TEST(Http, ChunkLinesAndTrailersAreLimited) {
  Server server({}, echo);
  const std::string head = "POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n";
  const std::string many(1 << 20, 'a');
  for (const std::string& body : {"5;" + many, "0;" + many, "0\r\nx: " + many, "0\r\nx: " + many + "\r\n\r\n",
                                  "0\r\nx: " + many.substr(0, 66000) + "\r\n\r\n"}) {
    Client client(server.port());
    client.send(head + body);
    const std::string received = client.receive_all();
    EXPECT_TRUE(received.starts_with("HTTP/1.1 400")) << received << body.substr(0, 10);
  }
  Client client(server.port());
  client.send(head + "5;a=b\r\nhello\r\n0\r\nx: y\r\n\r\n");
  EXPECT_NE(client.receive_until("POST /a hello").find("POST /a hello"), std::string::npos);
  client.close();
  EXPECT_TRUE(server.quiet());
}

// The parser throws at a field of 64 KiB, beyond the reach of whoever waits for the request.
TEST(Http, WhatTheParserThrowsEndsItsConnectionAlone) {
  Server server({.max_header = 1 << 20}, echo);
  Client other(server.port());
  other.send("GET /a HTTP/1.1\r\nhost: x\r\n");
  {
    Client client(server.port());
    client.send("GET / HTTP/1.1\r\nx: " + std::string(70000, 'a') + "\r\n\r\n");
    client.receive_all();
  }
  other.send("\r\n");
  EXPECT_NE(other.receive_until("GET /a ").find("GET /a "), std::string::npos);
  other.close();
  EXPECT_TRUE(server.quiet());
}

TEST(Http, WhoLeavesAfterMoreThanARequestIsNoticed) {
  std::atomic<bool> taken = false, gone = false;
  std::shared_ptr<HttpReply> kept;
  Server server({}, [&](HttpRequest, std::shared_ptr<HttpReply> reply) {
    reply->on_gone([&] { gone = true; });
    kept = std::move(reply);
    taken = true;
  });
  Client client(server.port());
  client.send("GET / HTTP/1.1\r\nhost: x\r\n\r\n");
  for (int i = 0; i < 500 && !taken; ++i) std::this_thread::sleep_for(milliseconds(10));
  client.send("\r\n");
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_FALSE(gone);
  client.close();
  EXPECT_TRUE(server.quiet());
  EXPECT_TRUE(gone);
  kept.reset();
}

// However long handlers of large bodies take, small ones and those of none are served.
TEST(Http, LargeBodiesHoldUpNobodyElse) {
  std::atomic<bool> go = false;
  std::atomic<int> inside = 0;
  Server server({.large_body = 1000}, [&](HttpRequest request, const std::shared_ptr<HttpReply>& reply) {
    if (request.body.size() > 1000) {
      ++inside;
      while (!go) std::this_thread::sleep_for(milliseconds(5));
    }
    reply->send({.body = "answer to " + request.path});
  });
  std::vector<std::unique_ptr<Client>> large;
  for (int i = 0; i < 8; ++i) {
    large.push_back(std::make_unique<Client>(server.port()));
    large.back()->send("POST /large HTTP/1.1\r\nhost: x\r\ncontent-length: 2000\r\n\r\n" +
                       std::string(2000, 'a'));
  }
  for (int i = 0; i < 500 && inside < 2; ++i) std::this_thread::sleep_for(milliseconds(10));
  EXPECT_EQ(inside, 2);
  EXPECT_EQ(testing::request(server.port(), "GET", "/health").body, "answer to /health");
  EXPECT_EQ(testing::request(server.port(), "POST", "/small", "abc").body, "answer to /small");
  go = true;
  for (auto& client : large)
    EXPECT_NE(client->receive_until("answer to /large").find("200"), std::string::npos);
}

TEST(Http, LargeBodiesAreLimitedTogether) {
  Server server({.large_body = 1000, .max_bodies = 5000}, echo);
  const std::string head = "POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 4000\r\n\r\n";
  {
    Client first(server.port());
    first.send(head + std::string(3000, 'a'));
    std::this_thread::sleep_for(milliseconds(100));
    Client second(server.port());
    second.send(head + std::string(3000, 'a'));
    EXPECT_TRUE(second.receive_all().starts_with("HTTP/1.1 503"));
    EXPECT_EQ(testing::request(server.port(), "POST", "/a", "small").status, 200);
    first.send(std::string(1000, 'b'));
    EXPECT_NE(first.receive_until("bbb").find("200"), std::string::npos);
  }
  EXPECT_TRUE(server.quiet());
  EXPECT_EQ(testing::request(server.port(), "POST", "/a", std::string(4000, 'a')).status, 200);
}

TEST(Http, HeadHasNoBodyAndAHostIsNeeded) {
  Server server({}, [](HttpRequest request, const std::shared_ptr<HttpReply>& reply) {
    if (request.path != "/stream") return reply->send({.body = "12345"});
    reply->begin({.content_type = "text/plain"});
    reply->write("12345");
    reply->end();
  });
  for (const char* path : {"/", "/stream"}) {
    Client client(server.port());  // kept alive: what came too much would be taken for the next answer
    client.send("HEAD " + std::string(path) + " HTTP/1.1\r\nhost: x\r\n\r\n");
    const std::string head = client.receive_until("\r\n\r\n");
    EXPECT_TRUE(head.ends_with("\r\n\r\n")) << head;
    client.send("GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    const std::string next = client.receive_all();
    EXPECT_TRUE(next.starts_with("HTTP/1.1 200")) << next;
    EXPECT_TRUE(next.ends_with("\r\n\r\n12345")) << next;
  }
  Client client(server.port());
  client.send("GET / HTTP/1.1\r\n\r\n");
  EXPECT_TRUE(client.receive_all().starts_with("HTTP/1.1 400"));
}

TEST(Http, APathMayComeAsAWholeAddress) {
  Server server({}, echo);
  EXPECT_EQ(testing::request(server.port(), "GET", "http://x:1/a/b?c=http://d").body, "GET /a/b ");
  EXPECT_EQ(testing::request(server.port(), "GET", "http://x").body, "GET / ");
  EXPECT_EQ(testing::request(server.port(), "GET", "/a?u=http://y/z").body, "GET /a ");
}

TEST(Http, EmptyLinesBeforeARequestAreNothing) {
  Server server({.read_timeout = seconds(1), .idle_timeout = seconds(1)}, echo);
  Client client(server.port());
  for (const char* lines : {"\r\n", "\r\n\r\n", "", "\r"}) {
    client.send(lines);
    std::this_thread::sleep_for(milliseconds(20));
    client.send(std::string(lines) == "\r" ? "\nGET /a HTTP/1.1\r\nhost: x\r\n\r\n"
                                           : "GET /a HTTP/1.1\r\nhost: x\r\n\r\n");
    EXPECT_NE(client.receive_until("GET /a ").find("200"), std::string::npos) << lines;
  }
  Client idler(server.port());  // who sends nothing else is not waited for
  std::atomic<bool> closed = false;
  std::thread lines([&] {
    while (!closed) {
      idler.send("\r\n");
      std::this_thread::sleep_for(milliseconds(100));
    }
  });
  std::string received;
  EXPECT_LE(seconds_to_close(idler, received), 8.0);
  closed = true;
  lines.join();
}

TEST(Http, RequestsThatArriveTogetherAreAnsweredInOrder) {
  Server server({}, echo);
  Client client(server.port());
  std::string all;
  for (int i = 0; i < 5; ++i)
    all += "POST /" + std::to_string(i) + " HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nab";
  client.send(all);
  const std::string received = client.receive_until("POST /4 ab");
  size_t at = 0;
  for (int i = 0; i < 5; ++i) {
    at = received.find("POST /" + std::to_string(i) + " ab", at);
    EXPECT_NE(at, std::string::npos) << i << received;
  }
}

}  // namespace
}  // namespace godwit::serve
