// Answers of a form, from a model with random weights: what holds for it holds for any model.
#include <gtest/gtest.h>

#include "tests/serve/client.h"
#include "tests/serve/server.h"
#include "tests/support/json_schema.h"

namespace godwit::serve {
namespace {

using testing::random_model;
using testing::request;
using testing::Server;

const char* const kSchema =
    R"({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["name", "age", "tags", "next"], "additionalProperties": false})";

Json chat(int64_t max_tokens, int seed, bool thinking) {
  return {{"messages", Json::array({{{"role", "user"}, {"content", "Who is it?"}}})},
          {"max_tokens", max_tokens},
          {"seed", seed},
          {"thinking", thinking},
          {"n", 4}};
}

Json answer(const Server& server, const Json& body) {
  const auto r = request(server.port(), "POST", "/v1/chat/completions", to_text(body));
  EXPECT_EQ(r.status, 200) << r.body;
  return Json::parse(r.body);
}

// The content of a streamed answer's first choice.
std::string streamed(const Server& server, Json body) {
  body["stream"] = true;
  const auto r = request(server.port(), "POST", "/v1/chat/completions", to_text(body));
  std::string text;
  for (size_t at = 0; (at = r.body.find("data: {", at)) != std::string::npos; ++at) {
    const Json event = Json::parse(r.body.substr(at + 6, r.body.find("\n\n", at) - at - 6));
    for (const Json& choice : event["choices"]) {
      if (choice["index"] == 0) text += choice["delta"].value("content", "");
    }
  }
  return text;
}

TEST(Format, JsonOfASchemaComesWhateverTheLimit) {
  Server server(random_model());
  const Json schema = Json::parse(kSchema);
  int cut = 0;
  for (int seed = 0; seed < 6; ++seed) {
    for (const int64_t limit : {75, 150, 400}) {
      Json body = chat(limit, seed, /*thinking=*/seed % 2 == 0);
      body["response_format"] = {{"type", "json_schema"},
                                 {"json_schema", {{"name", "person"}, {"strict", true}, {"schema", schema}}}};
      const Json whole = answer(server, body);
      for (const Json& choice : whole["choices"]) {
        const auto text = choice["message"]["content"].get<std::string>();
        const Json value = Json::parse(text, nullptr, /*allow_exceptions=*/false);
        ASSERT_FALSE(value.is_discarded()) << text;
        EXPECT_TRUE(test::valid(value, schema, schema)) << text;
        cut += choice["finish_reason"] == "length";
      }
      if (seed == 0) {
        EXPECT_EQ(streamed(server, body), whole["choices"][0]["message"]["content"].get<std::string>());
      }
    }
  }
  EXPECT_GT(cut, 0);  // random weights do not stop thinking by themselves
}

TEST(Format, TooSmallALimitCuts) {
  Server server(random_model());
  Json body = chat(5, 1, /*thinking=*/false);
  body["response_format"] = {{"type", "json_schema"}, {"json_schema", {{"schema", Json::parse(kSchema)}}}};
  for (const Json& choice : answer(server, body)["choices"]) {
    EXPECT_EQ(choice["finish_reason"], "length");
    EXPECT_TRUE(choice["message"]["content"].get<std::string>().starts_with("{")) << choice;
  }
}

TEST(Format, JsonObject) {
  Server server(random_model());
  for (int seed = 0; seed < 4; ++seed) {
    Json body = chat(60, seed, /*thinking=*/false);
    body["response_format"] = {{"type", "json_object"}};
    for (const Json& choice : answer(server, body)["choices"])
      EXPECT_TRUE(Json::parse(choice["message"]["content"].get<std::string>()).is_object());
  }
}

TEST(Format, ToolsThatMustBeCalledAreCalledWithTheirArguments) {
  Server server(random_model());
  const Json parameters =
      Json::parse(R"({"type": "object", "properties": {"city": {"type": "string", "maxLength": 20},
      "days": {"type": "integer", "minimum": 1, "maximum": 14}, "unit": {"enum": ["C", "F"]}}, "required": ["city", "days", "unit"],
      "additionalProperties": false})");
  const auto tool = [&](const char* name) {
    return Json{{"type", "function"},
                {"function", {{"name", name}, {"parameters", parameters}, {"strict", true}}}};
  };
  for (const Json& choice :
       {Json("required"), Json{{"type", "function"}, {"function", {{"name", "second"}}}}}) {
    for (int seed = 0; seed < 4; ++seed) {
      Json body = chat(250, seed, /*thinking=*/seed % 2 == 0);
      body["tools"] = Json::array({tool("first"), tool("second")});
      body["tool_choice"] = choice;
      body["parallel_tool_calls"] = seed % 2 == 0;
      for (const Json& each : answer(server, body)["choices"]) {
        const Json& calls = each["message"]["tool_calls"];
        ASSERT_FALSE(calls.empty()) << each;
        if (seed % 2) {
          EXPECT_EQ(calls.size(), 1u);
        }
        for (const Json& call : calls) {
          if (choice.is_object()) {
            EXPECT_EQ(call["function"]["name"], "second");
          }
          const Json arguments = Json::parse(call["function"]["arguments"].get<std::string>());
          EXPECT_TRUE(test::valid(arguments, parameters, parameters)) << arguments;
        }
      }
    }
  }
}

TEST(Format, RefusalsNameTheKeywordAndItsPlace) {
  Server server(random_model());
  const auto refusal = [&](Json more) {
    Json body = chat(10, 1, false);
    body.update(more);
    const auto r = request(server.port(), "POST", "/v1/chat/completions", to_text(body));
    EXPECT_EQ(r.status, 400) << r.body;
    return Json::parse(r.body)["error"]["message"].get<std::string>();
  };
  const auto schema = [](const char* text) {
    return Json{
        {"response_format", {{"type", "json_schema"}, {"json_schema", {{"schema", Json::parse(text)}}}}}};
  };
  const auto has = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  has(refusal(schema(R"({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": true}}})")),
      "response_format: schema.properties.a.uniqueItems");
  has(refusal(schema(R"({"patternProperties": {}})")), "schema.patternProperties");
  const Json tools = Json::array(
      {{{"type", "function"},
        {"function", {{"name", "f"}, {"strict", true}, {"parameters", {{"not", {{"type", "null"}}}}}}}}});
  has(refusal({{"tools", tools}}), "tools.f.parameters.not");
  has(refusal({{"tool_choice", "required"}}), "there are no tools");
  has(refusal({{"tools", tools}, {"tool_choice", {{"type", "function"}, {"function", {{"name", "g"}}}}}}),
      "there is no tool 'g'");
  has(refusal({{"tool_choice", {{"type", "king"}}}}), "tool_choice.type");
}

}  // namespace
}  // namespace godwit::serve
