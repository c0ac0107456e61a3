// The server in this process, clients over sockets.
#include "godwit/serve/service.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "godwit/serve/answer.h"
#include "tests/serve/client.h"
#include "tests/serve/server.h"

namespace godwit::serve {
namespace {

using testing::Client;
using testing::random_model;
using testing::request;
using testing::Server;

std::string completion(int64_t max_tokens, int seed, bool stream = false) {
  return to_text({{"model", "tiny"},
                  {"prompt", "The quick brown fox " + std::to_string(seed)},
                  {"max_tokens", max_tokens},
                  {"seed", seed},
                  {"stream", stream}});
}

// The text of all events of a stream.
std::string streamed_text(const std::string& body, bool& done) {
  std::string text;
  done = false;
  for (size_t at = 0; (at = body.find("data: ", at)) != std::string::npos;) {
    at += 6;
    const std::string event = body.substr(at, body.find("\n\n", at) - at);
    if (event == "[DONE]") {
      done = true;
      continue;
    }
    const Json json = Json::parse(event);
    for (const Json& choice : json["choices"]) {
      if (choice.contains("text")) text += choice["text"].get<std::string>();
      if (choice.contains("delta") && choice["delta"].contains("content"))
        text += choice["delta"]["content"].get<std::string>();
    }
  }
  return text;
}

TEST(Service, StreamAndWholeAnswerAgree) {
  Server server(random_model());
  const auto whole = request(server.port(), "POST", "/v1/completions", completion(20, 3));
  ASSERT_EQ(whole.status, 200) << whole.body;
  const Json body = Json::parse(whole.body);
  EXPECT_EQ(body["object"], "text_completion");
  EXPECT_EQ(body["usage"]["completion_tokens"], 20);
  EXPECT_EQ(body["choices"][0]["finish_reason"], "length");
  const auto stream = request(server.port(), "POST", "/v1/completions", completion(20, 3, true));
  ASSERT_EQ(stream.status, 200);
  EXPECT_NE(stream.head.find("text/event-stream"), std::string::npos);
  bool done = false;
  EXPECT_EQ(streamed_text(stream.body, done), body["choices"][0]["text"]);
  EXPECT_TRUE(done);
}

TEST(Service, StopIdsEndTheText) {
  Server server(random_model());
  Json body = {{"prompt", "And"}, {"max_tokens", 4}, {"temperature", 0}, {"logit_bias", {{"65", 100}}}};
  const auto choice = [&] {
    return Json::parse(request(server.port(), "POST", "/v1/completions", to_text(body)).body)["choices"][0];
  };
  EXPECT_EQ(choice()["finish_reason"], "length");
  body["stop_token_ids"] = {64, 65};
  EXPECT_EQ(choice()["finish_reason"], "stop");
  EXPECT_EQ(choice()["text"], "");
  body["stop_token_ids"] = {1 << 30};
  EXPECT_EQ(request(server.port(), "POST", "/v1/completions", to_text(body)).status, 400);
}

// Of the tokens that made the stop string too, and where each begins in the text.
TEST(Service, LogprobsOfAStreamAreThoseOfTheWhole) {
  Server server(random_model());
  int stopped = 0;
  for (int seed = 0; seed < 12; ++seed) {
    Json body = {{"prompt", "And"}, {"max_tokens", 30}, {"seed", seed}, {"logprobs", 1}};
    const auto whole = [&] {
      return Json::parse(request(server.port(), "POST", "/v1/completions", to_text(body)).body)["choices"][0];
    };
    const Json free = whole();
    const auto& offsets = free["logprobs"]["text_offset"];
    for (size_t i = 0; i + 1 < offsets.size(); ++i) EXPECT_LE(offsets[i], offsets[i + 1]);
    const std::string text = free["text"];
    size_t at = text.size() / 2;
    while (at > 0 && (text[at] & 0xc0) == 0x80) --at;
    const size_t end = text.find_first_of(" abcdefghijklmnopqrstuvwxyz", at);
    if (at == 0 || end == text.npos) continue;
    body["stop"] = text.substr(at, end + 1 - at);
    if (body["stop"].get<std::string>().find("\xef\xbf\xbd") != std::string::npos) continue;
    const Json cut = whole();
    stopped += cut["finish_reason"] == "stop" ? 1 : 0;
    body["stream"] = true;
    Json tokens = Json::array(), begins = Json::array();
    const std::string events = request(server.port(), "POST", "/v1/completions", to_text(body)).body;
    for (size_t p = 0; (p = events.find("data: {", p)) != std::string::npos; ++p) {
      const Json choice = Json::parse(events.substr(p + 6, events.find("\n\n", p) - p - 6))["choices"][0];
      if (choice["logprobs"].is_null()) continue;
      for (const Json& token : choice["logprobs"]["tokens"]) tokens.push_back(token);
      for (const Json& begin : choice["logprobs"]["text_offset"]) begins.push_back(begin);
    }
    EXPECT_EQ(tokens, cut["logprobs"]["tokens"]) << seed;
    EXPECT_EQ(begins, cut["logprobs"]["text_offset"]) << seed;
  }
  EXPECT_GT(stopped, 3);
}

TEST(Service, ChatWithThinkingAndLogprobs) {
  Server server(random_model());
  const std::string body =
      R"({"messages": [{"role": "user", "content": "Hello <|end_of_msg|>"}], "max_tokens": 12, "seed": 1,
                               "logprobs": true, "top_logprobs": 2, "n": 2})";
  const auto answer = request(server.port(), "POST", "/v1/chat/completions", body);
  ASSERT_EQ(answer.status, 200) << answer.body;
  const Json json = Json::parse(answer.body);
  EXPECT_EQ(json["choices"].size(), 2u);
  for (const Json& choice : json["choices"]) {
    EXPECT_EQ(choice["message"]["role"], "assistant");
    for (const Json& token : choice["logprobs"]["content"]) {
      EXPECT_LE(token["logprob"].get<double>(), 0.0);
      EXPECT_EQ(token["top_logprobs"].size(), 2u);
    }
  }
}

TEST(Service, ToolCallsAreReadAndStreamed) {
  // A model that always answers with one call: every token's follower is fixed.
  const Tokenizer tokenizer = Tokenizer::load(GODWIT_FIXTURES "/tokenizer");
  ChatOptions options{.thinking = false};
  ChatMessage turn;
  turn.role = ChatRole::kAssistant;
  turn.tool_calls.push_back({.id = "x", .name = "f", .arguments = R"({"q":1})"});
  const std::vector<ChatMessage> messages = {ChatMessage{.role = ChatRole::kUser}, turn};
  // The bigram model can follow a text only while no token comes twice, so the call is checked at the level
  // of Answer instead: its tokens are pushed one by one.
  options.generation_prompt = false;
  const ChatIds ids = encode_chat(render_chat(messages, options), tokenizer);
  std::vector<int32_t> sampled;
  for (size_t i = 0; i < ids.ids.size(); ++i) {
    if (ids.trained[i]) sampled.push_back(ids.ids[i]);
  }
  const ParsedTurn parsed = parse_turn(tokenizer, sampled, /*thinking=*/false);
  ASSERT_EQ(parsed.message.tool_calls.size(), 1u);

  struct Capture : HttpReply {
    std::string text;
    void send(HttpResponse r) override { text = r.body; }
    void begin(HttpResponse) override {}
    bool write(std::string_view data) override {
      text += data;
      return true;
    }
    void end() override {}
    void on_gone(std::function<void()>) override {}
    bool gone() override { return false; }
  };
  for (const bool stream : {false, true}) {
    Metrics metrics;
    const auto reply = std::make_shared<Capture>();
    AnswerHead head{.id = "id", .model = "m", .params = {.stream = stream}, .thinking = false};
    Answer answer(head, tokenizer, reply, metrics);
    for (const int32_t id : sampled) answer.on_token(0, {.id = id});
    answer.on_finish(0, {.reason = FinishReason::kStop});
    std::string name, arguments, reason;
    if (stream) {
      for (size_t at = 0; (at = reply->text.find("data: {", at)) != std::string::npos; ++at) {
        const Json event = Json::parse(reply->text.substr(at + 6, reply->text.find("\n\n", at) - at - 6));
        const Json& choice = event["choices"][0];
        if (choice["finish_reason"].is_string()) reason = choice["finish_reason"];
        if (!choice["delta"].contains("tool_calls")) continue;
        const Json& part = choice["delta"]["tool_calls"][0]["function"];
        name += part.value("name", "");
        arguments += part.value("arguments", "");
      }
    } else {
      const Json choice = Json::parse(reply->text)["choices"][0];
      name = choice["message"]["tool_calls"][0]["function"]["name"];
      arguments = choice["message"]["tool_calls"][0]["function"]["arguments"];
      reason = choice["finish_reason"];
      EXPECT_TRUE(choice["message"]["content"].is_null());
    }
    EXPECT_EQ(name, "f");
    EXPECT_EQ(Json::parse(arguments), Json::parse(R"({"q":1})"));
    EXPECT_EQ(reason, "tool_calls");
  }
}

TEST(Service, ManyClientsGetTheAnswersTheyWouldGetAlone) {
  constexpr int kClients = 24;
  std::vector<std::string> alone(kClients), together(kClients);
  {
    Server server(random_model());
    for (int i = 0; i < kClients; ++i)
      alone[i] = request(server.port(), "POST", "/v1/completions", completion(16, i)).body;
  }
  Server server(random_model());
  std::vector<std::thread> clients;
  for (int i = 0; i < kClients; ++i) {
    clients.emplace_back(
        [&, i] { together[i] = request(server.port(), "POST", "/v1/completions", completion(16, i)).body; });
  }
  for (auto& t : clients) t.join();
  for (int i = 0; i < kClients; ++i)
    EXPECT_EQ(Json::parse(together[i])["choices"][0]["text"], Json::parse(alone[i])["choices"][0]["text"])
        << i;
}

TEST(Service, ClientsThatGoFreeTheirSequences) {
  Server server(random_model());
  const int64_t free = server.stats().free_pages;
  for (int i = 0; i < 40; ++i) {
    Client client(server.port());
    const std::string body = completion(1000, i, i % 2 == 0);
    client.send("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: " + std::to_string(body.size()) +
                "\r\n\r\n" + body);
    if (i % 4 == 0) client.receive();
  }  // closed here, answered or not
  EXPECT_TRUE(server.idle());
  EXPECT_EQ(server.stats().failed, 0);
  EXPECT_GE(server.stats().free_pages, free - server.stats().prefix_entries);
  EXPECT_EQ(request(server.port(), "POST", "/v1/completions", completion(4, 1)).status, 200);
}

TEST(Service, BadRequestsGetOneClearAnswer) {
  Server server(random_model(), {.model_name = "tiny"}, {.max_sequences = 2, .max_context = 256},
                {.max_body = 100000});
  const auto status = [&](const std::string& method, const std::string& path, const std::string& body = {}) {
    const auto r = request(server.port(), method, path, body);
    if (r.status >= 400) {
      EXPECT_TRUE(Json::parse(r.body)["error"]["message"].is_string()) << r.body;
    }
    return r.status;
  };
  EXPECT_EQ(status("GET", "/nothing"), 404);
  EXPECT_EQ(status("GET", "/v1/completions"), 405);
  EXPECT_EQ(status("POST", "/v1/completions", "{"), 400);
  EXPECT_EQ(status("POST", "/v1/completions", R"({"prompt": ""})"), 400);
  EXPECT_EQ(status("POST", "/v1/completions", R"({"prompt": [99999999]})"), 400);
  EXPECT_EQ(status("POST", "/v1/completions", R"({"prompt": "a", "model": "other"})"), 404);
  EXPECT_EQ(status("POST", "/v1/chat/completions", R"({"messages": []})"), 400);
  EXPECT_EQ(status("POST", "/v1/completions", to_text({{"prompt", std::string(90000, 'a')}})),
            400);  // too long a context
  EXPECT_EQ(status("POST", "/v1/completions", std::string(200000, ' ')), 413);
  EXPECT_EQ(status("POST", "/detokenize", R"({"tokens": [1234567]})"), 400);
  EXPECT_EQ(status("GET", "/health"), 200);
  for (const std::string raw :
       {"nonsense\r\n\r\n", "GET / HTTP/9.9\r\n\r\n", "POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n"}) {
    Client client(server.port());
    client.send(raw);
    const std::string answer = client.receive_all();
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 4")) << raw << answer;
  }
  Client client(server.port());
  client.send("GET / HTTP/1.1\r\nx: " + std::string(40000, 'y') + "\r\n\r\n");
  EXPECT_TRUE(client.receive_all().starts_with("HTTP/1.1 431"));
  const std::string metrics = request(server.port(), "GET", "/metrics").body;
  for (const char* count : {"{path=\"none\",status=\"431\"} 1", "{path=\"none\",status=\"413\"} 1",
                            "{path=\"other\",status=\"404\"} 1", "{path=\"/health\",status=\"200\"} 1"})
    EXPECT_NE(metrics.find(count), std::string::npos) << count << metrics;
}

TEST(Service, AsksForItsKey) {
  Server server(random_model(), {.model_name = "tiny", .api_key = "secret"});
  EXPECT_EQ(request(server.port(), "GET", "/v1/models").status, 401);
  EXPECT_EQ(request(server.port(), "GET", "/v1/models", "", "authorization: Bearer secreT\r\n").status, 401);
  EXPECT_EQ(request(server.port(), "GET", "/v1/models", "", "authorization: Bearer secret\r\n").status, 200);
  EXPECT_EQ(request(server.port(), "GET", "/v1/models", "", "authorization: bearer secret\r\n").status, 200);
  EXPECT_EQ(request(server.port(), "GET", "/health").status, 200);
}

TEST(Service, QueueIsBounded) {
  Server server(random_model(), {.model_name = "tiny", .max_waiting = 2},
                {.max_sequences = 1, .max_context = 1024});
  std::vector<std::unique_ptr<Client>> clients;
  bool refused = false;
  for (int i = 0; i < 12 && !refused; ++i) {
    clients.push_back(std::make_unique<Client>(server.port()));
    const std::string body = completion(900, i, true);
    clients.back()->send("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: " +
                         std::to_string(body.size()) + "\r\n\r\n" + body);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    refused = server.stats().waiting >= 2;
  }
  const auto answer = request(server.port(), "POST", "/v1/completions", completion(5, 1));
  EXPECT_EQ(answer.status, 429) << answer.body;
  EXPECT_NE(answer.head.find("retry-after"), std::string::npos);
}

// The cache holds one sequence: the other request waits, then hears that it should come again.
TEST(Service, WhoWaitsTooLongIsToldSo) {
  Server server(random_model(), {.model_name = "tiny"},
                {.max_sequences = 1, .max_context = 4096, .max_wait_s = 0.02});
  Client first(server.port());
  Json longest = Json::parse(completion(4000, 1, true));
  longest["logit_bias"] = {{"65", 100}};  // never the end
  const std::string body = to_text(longest);
  first.send("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: " + std::to_string(body.size()) +
             "\r\n\r\n" + body);
  for (int i = 0; i < 500 && server.stats().running == 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  const auto answer = request(server.port(), "POST", "/v1/completions", completion(5, 2));
  EXPECT_EQ(answer.status, 503) << answer.body;
  EXPECT_NE(answer.body.find("try again later"), std::string::npos) << answer.body;
  EXPECT_NE(answer.head.find("retry-after"), std::string::npos) << answer.head;
}

TEST(Metrics, TokensOfTheLastSeconds) {
  RecentRate rate;
  const RecentRate::Clock::time_point start{std::chrono::hours(5)};
  const auto after = [&](int64_t seconds) { return start + std::chrono::seconds(seconds); };
  EXPECT_EQ(rate.per_second(start), 0);
  for (int64_t second = 0; second < 30; ++second) {
    for (int i = 0; i < 4; ++i) rate.add(after(second));
  }
  EXPECT_EQ(rate.per_second(after(30)), 4);
  EXPECT_EQ(rate.per_second(after(35)), 2);  // five quiet seconds among ten
  EXPECT_EQ(rate.per_second(after(300)), 0);
}

TEST(Service, PageModelsMetricsTokens) {
  Server server(random_model());
  EXPECT_NE(request(server.port(), "GET", "/").body.find("<!doctype html>"), std::string::npos);
  EXPECT_EQ(Json::parse(request(server.port(), "GET", "/v1/models").body)["data"][0]["id"], "tiny");
  request(server.port(), "POST", "/v1/completions", completion(5, 1));
  std::string metrics;  // published when the step is over, a moment after its last token was sent
  for (int i = 0; i < 500 && metrics.find("godwit_drawn_tokens_total 5") == std::string::npos; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    metrics = request(server.port(), "GET", "/metrics").body;
  }
  EXPECT_NE(metrics.find("godwit_drawn_tokens_total 5"), std::string::npos) << metrics;
  EXPECT_NE(metrics.find("godwit_time_to_first_token_seconds_count 1"), std::string::npos);
  for (const char* name :
       {"godwit_requests_waiting 0", "godwit_tokens_per_second ", "godwit_inter_token_seconds_count 4",
        "godwit_cache_hit_tokens_total{group=\"mla\"} 0", "godwit_cache_hit_tokens_total{group=\"kda\"} 0",
        "godwit_prefix_hits_total{tier=\"host\"} 0"})
    EXPECT_NE(metrics.find(name), std::string::npos) << name << "\n" << metrics;
  const Json ids = Json::parse(request(server.port(), "POST", "/tokenize", R"({"prompt": "Grüße!"})").body);
  EXPECT_EQ(ids["count"], ids["tokens"].size());
  const auto text = request(server.port(), "POST", "/detokenize", to_text({{"tokens", ids["tokens"]}}));
  EXPECT_EQ(Json::parse(text.body)["prompt"], "Grüße!");
}

}  // namespace
}  // namespace godwit::serve
