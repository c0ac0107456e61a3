// What a server does for itself: queue, long prompts, stopping, pages of other origins.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "godwit/serve/prompt.h"
#include "godwit/serve/protocol.h"
#include "tests/serve/client.h"
#include "tests/serve/server.h"

namespace godwit::serve {
namespace {

using testing::Client;
using testing::random_model;
using testing::request;
using testing::Response;
using testing::Server;

const std::string kCompletions = "/v1/completions";

// Never ends by itself.
Json endless(int64_t max_tokens, int64_t choices = 1, bool stream = true) {
  return {
      {"prompt", "And it came"}, {"max_tokens", max_tokens}, {"n", choices}, {"stream", stream}, {"seed", 1},
      {"ignore_eos", true}};
}

void send(Client& client, const Json& body) {
  const std::string text = to_text(body);
  client.send("POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: " +
              std::to_string(text.size()) + "\r\n\r\n" + text);
}

Response post(const Server& server, const Json& body) {
  return request(server.port(), "POST", kCompletions, to_text(body));
}

Json error_of(const Response& response) {
  return Json::parse(response.body)["error"];
}

bool wait_for(const std::function<bool()>& there) {
  for (int i = 0; i < 1000; ++i) {
    if (there()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

std::string metric(const Server& server, const std::string& name) {
  const std::string text = request(server.port(), "GET", "/metrics").body;
  const size_t at = text.find("\n" + name + " ");
  if (at == text.npos) return "none";
  return text.substr(at + name.size() + 2, text.find('\n', at + 1) - at - name.size() - 2);
}

// One request of many choices is one in the queue, and the wait of its later choices is no wait for a place.
TEST(Limits, TheQueueCountsRequests) {
  Server server(random_model(), {.model_name = "tiny", .max_waiting = 2},
                {.max_sequences = 1, .max_context = 1024, .max_wait_s = 0.05});
  Client first(server.port());
  send(first, endless(200, 20));
  ASSERT_TRUE(wait_for([&] { return server.stats().running == 1 && server.stats().waiting >= 10; }));
  EXPECT_EQ(metric(server, "godwit_requests_running"), "1");
  EXPECT_EQ(metric(server, "godwit_requests_waiting"), "0");
  const std::string all = first.receive_all();  // 20 choices one after the other take longer than max_wait
  EXPECT_NE(all.find("[DONE]"), std::string::npos) << all.substr(all.size() - 300);
  EXPECT_EQ(all.find("\"error\""), std::string::npos);
}

TEST(Limits, AFullQueueSaysSoBeforeTheBodyIsRead) {
  Server server(random_model(), {.model_name = "tiny", .max_waiting = 1},
                {.max_sequences = 1, .max_context = 1024});
  Client first(server.port()), second(server.port());
  send(first, endless(1000));
  ASSERT_TRUE(wait_for([&] { return server.stats().running == 1; }));
  send(second, endless(1000, 8));
  ASSERT_TRUE(wait_for([&] { return server.stats().waiting == 8; }));
  const Response third = request(server.port(), "POST", kCompletions, "{ no JSON");
  EXPECT_EQ(third.status, 429) << third.body;
  EXPECT_EQ(error_of(third)["code"], "rate_limit_exceeded");
}

// What the head alone tells is said before the body comes.
TEST(Limits, WhatTheHeadTellsIsSaidAtOnce) {
  Server server(random_model(), {.model_name = "tiny", .api_key = "secret", .max_waiting = 1},
                {.max_sequences = 1, .max_context = 1024});
  const auto answer = [&](const std::string& path, const std::string& headers) {
    Client client(server.port());
    client.send("POST " + path + " HTTP/1.1\r\nhost: x\r\n" + headers +
                "content-length: 30000000\r\n\r\nabc");
    return client.receive_all();  // the rest never comes
  };
  const std::string key = "authorization: Bearer secret\r\n";
  EXPECT_TRUE(answer(kCompletions, "").starts_with("HTTP/1.1 401"));
  EXPECT_TRUE(answer("/nothing", key).starts_with("HTTP/1.1 404"));
  EXPECT_TRUE(answer("/health", key).starts_with("HTTP/1.1 405"));
  EXPECT_TRUE(answer(kCompletions, key + "content-type: image/png\r\n").starts_with("HTTP/1.1 415"));
  EXPECT_TRUE(answer(kCompletions, key + "origin: http://evil.example\r\n").starts_with("HTTP/1.1 403"));
  server.service().drain();
  const std::string stopping = answer(kCompletions, key);
  EXPECT_TRUE(stopping.starts_with("HTTP/1.1 503"));
  EXPECT_NE(stopping.find("x-request-id: "), std::string::npos);
}

// A burst that finds free places is no queue.
TEST(Limits, FreePlacesAreNoQueue) {
  Server server(random_model(), {.model_name = "tiny", .max_waiting = 1},
                {.max_sequences = 8, .max_context = 1024});
  std::vector<std::thread> clients;
  std::atomic<int> answered = 0;
  for (int i = 0; i < 8; ++i)
    clients.emplace_back([&] { answered += post(server, endless(5)).status == 200 ? 1 : 0; });
  for (auto& client : clients) client.join();
  EXPECT_EQ(answered, 8);
}

TEST(Limits, LongPromptsAreRefusedWithTheirLength) {
  Server server(random_model(), {.model_name = "tiny"}, {.max_sequences = 2, .max_context = 256});
  const auto refusal = [&](const Json& prompt) {
    const Response r = post(server, {{"prompt", prompt}});
    EXPECT_EQ(r.status, 400) << r.body;
    EXPECT_EQ(error_of(r)["param"], "prompt") << r.body;
    EXPECT_EQ(error_of(r)["code"], "context_length_exceeded") << r.body;
    return error_of(r)["message"].get<std::string>();
  };
  const std::string text(3000, 'q');
  const Json tokens =
      Json::parse(request(server.port(), "POST", "/tokenize", to_text({{"prompt", text}})).body);
  EXPECT_NE(refusal(text).find(tokens["count"].dump() + " tokens; this server's context holds 256"),
            std::string::npos);
  EXPECT_NE(refusal(std::vector<int>(300, 5)).find("has 300 tokens"), std::string::npos);
  EXPECT_NE(refusal(std::string(20 << 20, 'q')).find("at least"), std::string::npos);
  const Response chat = request(server.port(), "POST", "/v1/chat/completions",
                                to_text({{"messages", {{{"role", "user"}, {"content", text}}}}}));
  EXPECT_EQ(chat.status, 400) << chat.body;
  EXPECT_EQ(error_of(chat)["param"], "messages");
}

TEST(PromptReader, EstimatesWhatItDoesNotRead) {
  const LoadedModel model = random_model();
  const std::string text(PromptReader::kExact + 400'000, 'q');
  const int64_t all = static_cast<int64_t>(model.tokenizer.encode(text, {.cut_long = true}).size());
  const auto message = [&](int64_t limit) {
    try {
      PromptReader(model.tokenizer, {.tokens = limit, .param = "p", .too_long = "no"}, [] {
        return false;
      }).text(text);
    } catch (const ApiError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_EQ(message(all + 1), "");
  const std::string said = message(all / 2);
  const size_t at = said.find("about ");
  ASSERT_NE(at, std::string::npos) << said;
  EXPECT_NEAR(std::stod(said.substr(at + 6)), static_cast<double>(all), 0.05 * static_cast<double>(all));
  int asked = 0;
  const PromptReader left(model.tokenizer, {.tokens = all + 1}, [&] { return ++asked > 3; });
  EXPECT_THROW(left.text(text), ClientGone);
}

TEST(Limits, ModelsMethodsAndIds) {
  Server server(random_model(), {.model_name = "a/tiny"});
  const auto call = [&](const std::string& method, const std::string& path, const std::string& headers = {}) {
    return request(server.port(), method, path, "", headers);
  };
  const Response model = call("GET", "/v1/models/a%2Ftiny");
  EXPECT_EQ(model.status, 200) << model.body;
  EXPECT_EQ(Json::parse(model.body)["id"], "a/tiny");
  EXPECT_EQ(call("GET", "/v1/models/a/tiny").status, 200);
  EXPECT_EQ(call("GET", "/v1/models/other").status, 404);
  EXPECT_EQ(error_of(call("GET", "/v1/models/other"))["code"], "model_not_found");
  EXPECT_NE(call("GET", "/v1/completions").head.find("allow: POST, OPTIONS"), std::string::npos);
  EXPECT_NE(call("DELETE", "/health").head.find("allow: GET, HEAD, OPTIONS"), std::string::npos);
  const Response head = call("HEAD", "/health");
  EXPECT_EQ(head.status, 200);
  EXPECT_EQ(head.body, "");
  EXPECT_NE(head.head.find("content-length: 15"), std::string::npos) << head.head;
  EXPECT_EQ(call("HEAD", "/nothing").body, "");
  const Response options = call("OPTIONS", "/v1/completions");
  EXPECT_EQ(options.status, 204);
  EXPECT_NE(options.head.find("allow: POST, OPTIONS"), std::string::npos);
  EXPECT_NE(call("GET", "/health", "x-request-id: me-1\r\n").head.find("x-request-id: me-1"),
            std::string::npos);
  EXPECT_NE(call("GET", "/health", "x-request-id: a b\r\n").head.find("x-request-id: req-"),
            std::string::npos);
}

TEST(Limits, PagesOfOtherOriginsNeedLeave) {
  const std::string body = R"({"prompt": "a", "max_tokens": 1})";
  const std::string page = "origin: https://a.example\r\nsec-fetch-site: cross-site\r\n";
  const auto ask = [&](const Server& server) {
    return request(server.port(), "POST", kCompletions, body, page + "content-type: application/json\r\n");
  };
  Server closed(random_model());
  EXPECT_EQ(ask(closed).status, 403);
  EXPECT_EQ(ask(closed).head.find("access-control"), std::string::npos);
  const auto from = [&](const Server& server, const std::string& host, const std::string& origin) {
    Client client(server.port());
    client.send("POST /v1/completions HTTP/1.1\r\nhost: " + host + "\r\norigin: " + origin +
                "\r\nconnection: close\r\ncontent-length: " + std::to_string(body.size()) + "\r\n\r\n" +
                body);
    return std::atoi(client.receive_all().c_str() + 9);
  };
  EXPECT_EQ(from(closed, "a.example:8080", "http://a.example:8080"), 200);
  EXPECT_EQ(from(closed, "a.example:8080", "http://b.example:8080"), 403);
  EXPECT_EQ(from(closed, "a.example:8080", "null"), 403);
  Server local(random_model(), {.model_name = "tiny", .loopback = true});
  EXPECT_EQ(from(local, "localhost:8080", "http://localhost:8080"), 200);
  EXPECT_EQ(from(local, "[::1]:8080", "http://[::1]:8080"), 200);
  EXPECT_EQ(from(local, "evil.example:8080", "http://evil.example:8080"), 403);  // DNS rebinding
  EXPECT_EQ(from(local, "127.evil.example", "http://127.evil.example"), 403);
  Server open(random_model(), {.model_name = "tiny", .allowed_origins = {"https://a.example"}});
  const Response answer = ask(open);
  EXPECT_EQ(answer.status, 200) << answer.body;
  EXPECT_NE(answer.head.find("access-control-allow-origin: https://a.example"), std::string::npos);
  const Response asked = request(open.port(), "OPTIONS", kCompletions, "",
                                 page + "access-control-request-headers: authorization\r\n");
  EXPECT_EQ(asked.status, 204);
  EXPECT_NE(asked.head.find("access-control-allow-headers: authorization"), std::string::npos) << asked.head;
  const Response other = request(open.port(), "GET", "/v1/models", "", "origin: https://b.example\r\n");
  EXPECT_EQ(other.head.find("access-control-allow-origin"), std::string::npos);
}

TEST(Limits, MediaTypes) {
  Server server(random_model());
  const auto status = [&](const std::string& header) {
    return request(server.port(), "POST", kCompletions, R"({"prompt": "a", "max_tokens": 1})", header).status;
  };
  for (const char* good :
       {"", "content-type: application/json\r\n", "Content-Type: Application/JSON; charset=\"UTF-8\"\r\n",
        "content-type: application/x-www-form-urlencoded\r\n"})
    EXPECT_EQ(status(good), 200) << good;
  for (const char* bad : {"content-type: multipart/form-data; boundary=x\r\n", "content-type: text/plain\r\n",
                          "content-type: application/json; charset=utf-16\r\n", "content-encoding: gzip\r\n"})
    EXPECT_EQ(status(bad), 415) << bad;
}

// A stop: what runs has its time, what comes is refused, what is left ends with an error, in its own form.
TEST(Limits, Stopping) {
  Server server(random_model(), {.model_name = "tiny"}, {.max_sequences = 1, .max_context = 100000});
  Client streaming(server.port()), waiting(server.port());
  send(streaming, endless(90000));
  EXPECT_NE(streaming.receive_until("data: ").find("200"), std::string::npos);
  send(waiting, endless(90000, 2, /*stream=*/false));
  ASSERT_TRUE(wait_for([&] { return server.stats().waiting == 2; }));
  server.service().drain();
  const Response refused = post(server, endless(1));
  EXPECT_EQ(refused.status, 503) << refused.body;
  EXPECT_NE(refused.head.find("retry-after"), std::string::npos);
  EXPECT_EQ(request(server.port(), "GET", "/health").status, 503);
  EXPECT_EQ(server.service().open_requests(), 2);
  server.service().end_all();
  const std::string stream = streaming.receive_all();
  EXPECT_NE(stream.find(R"(data: {"error":{"message":"the server is stopping")"), std::string::npos)
      << stream.substr(stream.size() - std::min<size_t>(stream.size(), 300));
  EXPECT_TRUE(stream.ends_with("0\r\n\r\n"));
  EXPECT_TRUE(waiting.receive_all().starts_with("HTTP/1.1 503"));
  EXPECT_TRUE(wait_for([&] { return server.service().open_requests() == 0; }));
}

TEST(Limits, MinTokensIgnoreEosEchoAndStops) {
  Server server(random_model());
  const auto text = [&](Json body) {
    body.update({{"prompt", "And"}, {"temperature", 0}});
    const Response r = post(server, body);
    EXPECT_EQ(r.status, 200) << r.body;
    const Json choice = Json::parse(r.body)["choices"][0];
    return std::pair(choice["text"].get<std::string>(), choice["finish_reason"].get<std::string>());
  };
  const Json a = {{"65", 100}};  // one letter again and again
  const auto four = text({{"max_tokens", 4}, {"logit_bias", a}}).first;
  ASSERT_EQ(four.size(), 4u);
  EXPECT_EQ(text({{"max_tokens", 4}, {"logit_bias", a}, {"echo", true}}).first, "And" + four);
  const std::string two = four.substr(0, 2);
  EXPECT_EQ(text({{"max_tokens", 4}, {"logit_bias", a}, {"stop", two}}).first, "");
  EXPECT_EQ(text({{"max_tokens", 4}, {"logit_bias", a}, {"stop", two}, {"include_stop_str_in_output", true}}),
            std::pair(two, std::string("stop")));
  // The bias is for an end id: it comes at once, or when the least is there, or never.
  const std::string end = std::to_string(random_model().tokenizer.special_id(kEos));
  const Json bias = {{end, 100}};
  EXPECT_EQ(text({{"max_tokens", 9}, {"logit_bias", bias}}), std::pair(std::string(), std::string("stop")));
  const Json five = {
      {"prompt", "And"}, {"max_tokens", 9}, {"min_tokens", 5}, {"logit_bias", bias}, {"temperature", 0}};
  EXPECT_EQ(Json::parse(post(server, five).body)["usage"]["completion_tokens"], 6);  // and the end
  EXPECT_EQ(text({{"max_tokens", 9}, {"ignore_eos", true}, {"logit_bias", bias}}).second, "length");
}

}  // namespace
}  // namespace godwit::serve
