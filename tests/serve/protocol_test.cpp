#include "godwit/serve/protocol.h"

#include <gtest/gtest.h>

#include "godwit/serve/request_body.h"

namespace godwit::serve {
namespace {

int status_of(const std::function<void()>& action, const std::string& named) {
  try {
    action();
  } catch (const ApiError& e) {
    EXPECT_NE(std::string(e.what()).find(named), std::string::npos) << e.what();
    return e.status();
  }
  return 200;
}

TEST(Protocol, ReadsWhatOpenAiClientsSend) {
  const CompletionParams p = completion_params(
      Json::parse(
          R"({"temperature": 0.5, "top_p": 0.9, "seed": 7, "n": 2, "stop": ["a", "bc"], "logprobs": true,
                      "top_logprobs": 3, "stream": true, "stream_options": {"include_usage": true},
                      "max_completion_tokens": 9, "max_tokens": 4, "logit_bias": {"5": -100}, "user": "somebody",
                      "stop_token_ids": [7, 8]})"),
      /*chat=*/true);
  EXPECT_EQ(p.sampling.temperature, 0.5);
  EXPECT_EQ(p.sampling.top_p, 0.9);
  EXPECT_EQ(p.sampling.seed, 7u);
  EXPECT_EQ(p.choices, 2);
  EXPECT_EQ(p.stop, (std::vector<std::string>{"a", "bc"}));
  EXPECT_EQ(p.stop_ids, (std::vector<int32_t>{7, 8}));
  EXPECT_EQ(p.top_logprobs, 3);
  EXPECT_TRUE(p.include_usage);
  EXPECT_EQ(p.max_tokens, 9);
  EXPECT_EQ(p.sampling.logit_bias.at(0), (std::pair<int32_t, double>(5, -100.0)));
}

TEST(Protocol, NamesTheKeyThatIsWrong) {
  for (const auto& [json, key] :
       std::vector<std::pair<std::string, std::string>>{{R"({"temperature": 3})", "temperature"},
                                                        {R"({"temperature": "hot"})", "temperature"},
                                                        {R"({"top_p": -1})", "top_p"},
                                                        {R"({"n": 0})", "n"},
                                                        {R"({"n": 1.5})", "n"},
                                                        {R"({"max_tokens": -4})", "max_tokens"},
                                                        {R"({"max_tokens": 1e300})", "max_tokens"},
                                                        {R"({"stop": [""]})", "stop"},
                                                        {R"({"stop": 5})", "stop"},
                                                        {R"({"stop_token_ids": 5})", "stop_token_ids"},
                                                        {R"({"stop_token_ids": [-1]})", "stop_token_ids"},
                                                        {R"({"stop_token_ids": ["a"]})", "stop_token_ids"},
                                                        {R"({"logit_bias": {"x": 1}})", "logit_bias"},
                                                        {R"({"logit_bias": {"1": 1000}})", "logit_bias"},
                                                        {R"({"top_logprobs": 5})", "top_logprobs"},
                                                        {R"({"stream_options": {}})", "stream_options"},
                                                        {R"({"stream": "yes"})", "stream"},
                                                        {R"({"seed": 0.5})", "seed"}}) {
    EXPECT_EQ(status_of([&] { completion_params(Json::parse(json), /*chat=*/true); }, key), 400) << json;
  }
  EXPECT_EQ(status_of([] { chat_request(Json::parse("{}")); }, "messages"), 400);
  EXPECT_EQ(status_of([] { chat_request(Json::parse(R"({"messages": [{"role": "king"}]})")); }, "king"), 400);
}

// The path in `param` is that of the key which is wrong.
TEST(Protocol, ParamIsThePathOfTheKey) {
  const Json chat = {{"messages", {{{"role", "user"}, {"content", "hi"}}}}};
  const auto f = [](const char* name) { return Json{{"type", "function"}, {"function", {{"name", name}}}}; };
  const auto param = [&](const Json& more) {
    Json body = chat;
    body.update(more);
    try {
      check_keys(body, Call::kChat);
      turn_format(chat_request(body));
    } catch (const ApiError& e) {
      EXPECT_EQ(e.status(), 400);
      return e.param();
    }
    return std::string("accepted");
  };
  const std::vector<std::pair<Json, std::string>> cases = {
      {{{"foo", 1}}, "foo"},
      {{{"functions", Json::array()}}, "functions"},
      {{{"echo", true}}, "echo"},
      {{{"tool_choice", "zzz"}}, "tool_choice"},
      {{{"tool_choice", 5}}, "tool_choice"},
      {{{"tool_choice", "required"}}, "tool_choice"},
      {{{"tool_choice", {{"type", "x"}}}}, "tool_choice.type"},
      {{{"tool_choice", {{"type", "function"}}}, {"tools", {f("a")}}}, "tool_choice.function.name"},
      {{{"tool_choice", {{"type", "allowed_tools"}}}}, "tool_choice.allowed_tools"},
      {{{"tools", 5}}, "tools"},
      {{{"tools", {5}}}, "tools[0]"},
      {{{"tools", {f("")}}}, "tools[0].function.name"},
      {{{"tools", {f("a"), f("a")}}}, "tools[1]"},
      {{{"tools", {{{"type", "web_search"}, {"function", {{"name", "a"}}}}}}}, "tools[0].type"},
      {{{"tools", {{{"type", "web_search"}}}}}, "tools[0].type"},
      {{{"thinking", {{"type", "enabled"}, {"budget_tokens", 5}}}}, "thinking"},
      {{{"response_format", {{"type", "json_object"}, {"grammar", "x"}}}}, "response_format.grammar"},
      {{{"response_format", {{"type", "json_object"}, {"schema", {{"type", "object"}}}}}}, "accepted"},
      {{{"tools", {{{"type", "function"}}}}}, "tools[0].function"},
      {{{"max_tokens", 9007199254740991}}, "accepted"},
      {{{"messages", {{{"role", "user"}, {"content", {{{"type", "text"}, {"text", "a"}, {"foo", 1}}}}}}}},
       "messages[0].content[0].foo"},
      {{{"messages", {{{"role", "user"}, {"content", "a"}, {"reasoning_content", "x"}}}}},
       "messages[0].reasoning_content"},
      {{{"messages", {{{"role", "user"}, {"content", "a"}, {"tool_calls", nullptr}, {"refusal", nullptr}}}}},
       "accepted"},
      {{{"tools", {f("a")}},
        {"tool_choice", {{"type", "function"}, {"function", {{"name", "a"}, {"x", 1}}}}}},
       "tool_choice.function.x"},
      {{{"response_format",
         {{"type", "json_schema"}, {"json_schema", {{"schema", {{"type", "object"}}}, {"strict", "yes"}}}}}},
       "response_format.json_schema.strict"},
      {{{"thinking", false}, {"reasoning_effort", "high"}}, "reasoning_effort"},
      {{{"thinking", true}, {"chat_template_kwargs", {{"enable_thinking", false}}}},
       "chat_template_kwargs.enable_thinking"},
      {{{"parallel_tool_calls", "x"}}, "parallel_tool_calls"},
      {{{"thinking", 5}}, "thinking"},
      {{{"reasoning_effort", "x"}}, "reasoning_effort"},
      {{{"reasoning_effort", 5}}, "reasoning_effort"},
      {{{"thinking_effort", "medium"}}, "thinking_effort"},
      {{{"chat_template_kwargs", {{"add", 1}}}}, "chat_template_kwargs.add"},
      {{{"response_format", {{"type", "zz"}}}}, "response_format.type"},
      {{{"response_format", {{"type", "json_schema"}}}}, "response_format.json_schema.schema"},
      {{{"response_format", {{"type", "json_object"}}}, {"min_tokens", 3}}, "min_tokens"},
      {{{"min_tokens", 3}, {"max_tokens", 2}}, "min_tokens"},
      {{{"stream", true}, {"stream_options", {{"include_usage", 1}}}}, "stream_options.include_usage"},
      {{{"stream", true}, {"stream_options", {{"zz", 1}}}}, "stream_options.zz"},
      {{{"stop", std::vector<std::string>(1000, "a")}}, "stop"},
      {{{"stop", std::string(5000, 'a')}}, "stop"},
      {{{"messages", {{{"role", "user"}}}}}, "messages[0].content"},
      {{{"messages", {{{"role", "king"}, {"content", "a"}}}}}, "messages[0].role"},
      {{{"messages", {{{"role", "user"}, {"content", "a"}, {"zz", 1}}}}}, "messages[0].zz"},
      {{{"messages", {{{"role", "user"}, {"content", {{{"type", "x"}}}}}}}}, "messages[0].content[0].type"},
      {{{"user", "me"}, {"metadata", {{"a", "b"}}}, {"store", true}, {"modalities", {"text"}}}, "accepted"},
      {{{"functions", nullptr}, {"echo", false}, {"service_tier", "auto"}}, "accepted"},
      {{{"tools", {f("a")}}, {"tool_choice", "none"}}, "accepted"},
  };
  for (const auto& [more, expected] : cases) EXPECT_EQ(param(more), expected) << more;
}

TEST(Protocol, KeysOfCompletions) {
  const auto param = [](const Json& more, Call call = Call::kCompletion) {
    try {
      check_keys(more, call);
      completion_params(more, /*chat=*/false);
    } catch (const ApiError& e) {
      return e.param();
    }
    return std::string("accepted");
  };
  EXPECT_EQ(param({{"prompt", "a"}, {"suffix", "b"}}), "suffix");
  EXPECT_EQ(param({{"prompt", "a"}, {"suffix", nullptr}, {"best_of", 2}, {"n", 2}}), "accepted");
  EXPECT_EQ(param({{"prompt", "a"}, {"best_of", 2}}), "best_of");
  EXPECT_EQ(param({{"prompt", "a"}, {"echo", true}, {"logprobs", 1}}), "echo");
  EXPECT_EQ(param({{"prompt", "a"}, {"messages", 1}}), "messages");
  EXPECT_EQ(param({{"tokens", {1}}, {"x", 1}}, Call::kDetokenize), "x");
}

TEST(Protocol, ChoicesAmongTools) {
  const auto format = [](const Json& choice) {
    Json body = {{"messages", {{{"role", "user"}, {"content", "hi"}}}}, {"tool_choice", choice}};
    for (const char* name : {"a", "b", "c"})
      body["tools"].push_back({{"type", "function"}, {"function", {{"name", name}}}});
    return turn_format(chat_request(body));
  };
  const auto allowed = [](const char* mode) {
    const auto f = [](const char* name) {
      return Json{{"type", "function"}, {"function", {{"name", name}}}};
    };
    return Json{{"type", "allowed_tools"}, {"allowed_tools", {{"mode", mode}, {"tools", {f("c"), f("a")}}}}};
  };
  EXPECT_FALSE(format("auto").has_value());
  EXPECT_EQ(format("none")->tool_use, ToolUse::kNone);
  EXPECT_EQ(format("required")->tools.size(), 3u);
  const auto some = format(allowed("auto"));
  EXPECT_EQ(some->tool_use, ToolUse::kAllowed);
  ASSERT_EQ(some->tools.size(), 2u);
  EXPECT_EQ(some->tools[1].name, "c");
  EXPECT_FALSE(some->tools[0].strict);
  EXPECT_EQ(format(allowed("required"))->tool_use, ToolUse::kRequired);
}

TEST(Protocol, NothingIsReadForWhoHasGone) {
  std::string body = R"({"a":[1)";
  for (int i = 0; i < 300'000; ++i) body += ",1";
  body += "]}";
  int asked = 0;
  EXPECT_EQ(parse_object(body, [&] { return ++asked < 0; })["a"].size(), 300'001u);
  EXPECT_GT(asked, 3);
  EXPECT_THROW(parse_object(body, [] { return true; }), ClientGone);
}

TEST(Protocol, RefusesKeysThatComeTwice) {
  EXPECT_EQ(status_of([] { parse_object(R"({"prompt": "a", "prompt": "b"})"); }, "'prompt' twice"), 400);
  EXPECT_EQ(status_of([] { parse_object(R"({"a": [{"b": 1, "c": {}, "b": 2}]})"); }, "'b' twice"), 400);
  EXPECT_EQ(parse_object(R"({"a": {"b": 1}, "b": [{"b": 1}, {"b": 2}]})").size(), 2u);
}

TEST(Protocol, RefusesBodiesThatAreNoObject) {
  for (const std::string body : {"", "[]", "{", "nul", "\xff\xfe", "{\"a\": 1} x"})
    EXPECT_EQ(status_of([&] { parse_object(body); }, ""), 400) << body;
  EXPECT_EQ(status_of([] { parse_object("{"); }, "the body is no JSON: parse error"), 400);
  EXPECT_EQ(status_of([&] { parse_object(std::string("{}\0x", 4)); }, "zero byte"), 400);
  const std::string deep = "{\"a\":" + std::string(100000, '[') + std::string(100000, ']') + "}";
  EXPECT_EQ(status_of([&] { parse_object(deep); }, "nested"), 400);
}

// An object's keys are looked through for every new one: many of them would take quadratic time.
TEST(Protocol, RefusesObjectsOfTooManyKeys) {
  const auto object = [](int keys) {
    std::string out;
    for (int i = 0; i < keys; ++i) {
      out += i > 0 ? ",\"" : "{\"";
      out += std::to_string(i);
      out += "\":{\"a\":1}";
    }
    return out + "}";
  };
  EXPECT_EQ(parse_object(object(4096)).size(), 4096u);
  EXPECT_EQ(status_of([&] { parse_object(object(4097)); }, "4096 keys"), 400);
  EXPECT_EQ(status_of([&] { parse_object(object(400000)); }, "4096 keys"), 400);
  EXPECT_EQ(status_of([&] { parse_object("{\"a\":[{\"b\":" + object(4097) + "}]}"); }, "4096 keys"), 400);
  Json chat = {{"messages", {{{"role", "assistant"}, {"content", ""}}}}};
  chat["messages"][0]["tool_calls"] = {
      {{"id", "1"}, {"type", "function"}, {"function", {{"name", "f"}, {"arguments", object(5000)}}}}};
  EXPECT_EQ(status_of([&] { chat_request(chat); }, "4096 keys"), 400);
  std::string list = object(4096);
  for (int i = 0; i < 20; ++i) list += "," + object(4096);
  EXPECT_EQ(status_of([&] { parse_object("{\"a\":[" + list + "]}"); }, "many large objects"), 400);
  std::string small = "{\"a\":[{}";  // many small ones are no matter
  for (int i = 0; i < 200000; ++i) small += ",{}";
  EXPECT_EQ(parse_object(small + "]}")["a"].size(), 200001u);
  std::string lists = "{\"a\":[[]";
  for (int i = 0; i < 2'000'000; ++i) lists += ",[]";
  EXPECT_EQ(status_of([&] { parse_object(lists + "]}"); }, "too many values"), 400);
}

// Whatever the pieces, the text before the first stop string comes out, and no part of one.
TEST(StopScanner, CutsAtTheFirstStopHoweverTheTextComes) {
  const std::vector<std::string> stops = {"STOP", "ST!", "end"};
  for (const std::string text :
       {"hello STOP there", "aSTaST!b", "SSTOP", "the e", "no such thing", "ST", "enend"}) {
    size_t cut = std::string::npos;
    for (const std::string& stop : stops) cut = std::min(cut, text.find(stop));
    const std::string expected = text.substr(0, cut);
    for (size_t piece = 1; piece <= text.size(); ++piece) {
      StopScanner scanner(stops);
      std::string out;
      for (size_t at = 0; at < text.size(); at += piece) {
        out += scanner.push(text.substr(at, piece));
        EXPECT_TRUE(expected.starts_with(out)) << out;
      }
      out += scanner.finish();
      EXPECT_EQ(out, expected) << text << " in pieces of " << piece;
      EXPECT_EQ(scanner.stopped(), cut != std::string::npos);
    }
  }
}

TEST(Protocol, ErrorsHaveOpenAisShape) {
  const Json body = Json::parse(error_body(400, "no", "n"));
  EXPECT_EQ(body["error"]["message"], "no");
  EXPECT_EQ(body["error"]["type"], "invalid_request_error");
  EXPECT_EQ(body["error"]["param"], "n");
  EXPECT_TRUE(body["error"].contains("code"));
  EXPECT_LT(error_body(400, std::string(1 << 20, 'a'), std::string(1 << 20, 'b')).size(), 2000u);
}

}  // namespace
}  // namespace godwit::serve
