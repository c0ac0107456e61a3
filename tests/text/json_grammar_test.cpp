#include "godwit/text/json_grammar.h"

#include <gtest/gtest.h>

#include <random>

#include "godwit/base/check.h"
#include "godwit/text/chat_parser.h"
#include "godwit/text/token_filter.h"
#include "godwit/text/turn_grammar.h"
#include "godwit/text/utf8.h"
#include "tests/support/json_schema.h"
#include "tests/text/tokenizer_fixture.h"

namespace godwit {
namespace {

using Json = nlohmann::ordered_json;

std::shared_ptr<const TokenTrie> trie() {
  static const auto shared = std::make_shared<const TokenTrie>(fixture_tokenizer());
  return shared;
}

std::shared_ptr<const Grammar> compile(const std::string& schema) {
  // The schema need not outlive its grammar.
  return json_grammar(Json::parse(schema));
}

// Whether the text is of the grammar, however it is cut into tokens: as the tokenizer does it, and in bytes.
bool takes(const std::shared_ptr<const Grammar>& grammar, const std::string& text) {
  std::vector<std::vector<int32_t>> cuts = {fixture_tokenizer().encode(text), {}};
  for (const char c : text) {
    for (int32_t id = 0; id < fixture_tokenizer().ranks(); ++id) {
      if (fixture_tokenizer().token_bytes(id) == std::string_view(&c, 1)) cuts[1].push_back(id);
    }
  }
  std::vector<bool> results;
  for (const auto& ids : cuts) {
    TokenFilter filter(grammar, trie(), 1 << 20);
    bool fits = true;
    for (const int32_t id : ids) {
      fits = filter.allows(id);
      if (!fits) break;
      filter.accept(id);
    }
    results.push_back(fits && filter.complete());
  }
  EXPECT_EQ(results[0], results[1]) << text;
  return results[0];
}

// A random text of the grammar: tokens drawn evenly from those that are allowed. The budget ends it; `more`
// tokens may follow where they cost nothing.
std::string draw(const std::shared_ptr<const Grammar>& grammar, int64_t budget, std::mt19937_64& random,
                 std::vector<int32_t>* ids = nullptr, int64_t* used = nullptr, int64_t more = 0) {
  TokenFilter filter(grammar, trie(), budget);
  std::string text;
  for (int64_t n = 0; n < budget + more; ++n) {
    std::vector<int32_t> allowed;
    const auto& bits = filter.allowed();
    for (int32_t id = 0; id < fixture_tokenizer().vocab_size(); ++id) {
      if (bits[id / 64] >> (id % 64) & 1) allowed.push_back(id);
    }
    // Where it may end, it does one time in two.
    if (allowed.empty() || (filter.complete() && random() % 2)) break;
    // Behind the budget text that costs nothing would go on for ever: specials, the last ids, end it.
    const int32_t id = n < budget ? allowed[random() % allowed.size()] : allowed.back();
    filter.accept(id);
    if (ids) ids->push_back(id);
    if (used) *used = n + 1;
    text += fixture_tokenizer().token_bytes(id);
  }
  EXPECT_TRUE(filter.complete()) << text;
  return text;
}

struct Case {
  const char* schema;
  std::vector<const char*> good, bad;
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {R"({"type": "integer"})",
       {"0", "-1", "12", "123456789012345678"},
       {"", "01", "1.5", "+1", "--1", "1234567890123456789", "1e3", "\"1\""}},
      {R"({"type": "number"})",
       {"0", "-0.5", "1e5", "1.25E-3", "10"},
       {".5", "1.", "01.5", "1e", "NaN", "1e100"}},
      {R"({"type": "boolean"})", {"true", "false"}, {"True", "tru", "truefalse", "0"}},
      {R"({"type": "null"})", {"null"}, {"nul", "None"}},
      {R"({"type": "string"})",
       {"\"\"", "\"a b\"", "\"\\n\\u00e4\\\"\"", "\"\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80\"",
        "\"\\ud83d\\ude00\""},
       {"\"", "a", "\"\n\"", "\"\\x\"", "\"\\ud83d\"", "\"\\ude00\"", "\"\xff\"", "\"\xc3\"",
        "\"\xed\xa0\x80\"", "\"a\"b"}},
      {R"({"type": ["string", "null"]})", {"null", "\"x\""}, {"1", "[]"}},
      {R"({"enum": ["a", 1, null, true, {"k": [1]}, "quote\"\u00e4"]})",
       {"\"a\"", "1", "null", "true", "{\"k\":[1]}", "\"quote\\\"\xc3\xa4\""},
       {"\"b\"", "2", "\"\"", "{}"}},
      {R"({"type": "string", "enum": ["a", 1]})", {"\"a\""}, {"1"}},
      {R"({"const": -3.5})", {"-3.5"}, {"3.5", "-3"}},
      {R"({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a", "b"],
           "additionalProperties": false})",
       {"{\"a\":1,\"b\":\"\"}", "{\"a\": 1, \"b\": \"x\"}", "{\n  \"a\": 1,\n  \"b\": \"x\"\n}"},
       {"{}", "{\"a\":1}", "{\"b\":\"x\",\"a\":1}", "{\"a\":1,\"b\":\"x\",\"c\":1}", "{\"a\":1,\"b\":\"x\",}",
        "{,\"a\":1}", "{\"a\":1,\"b\":2}"}},
      {R"({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {"type": "integer"}}, "required": ["b"]})",
       {"{\"b\":1}", "{\"a\":1,\"b\":2}", "{\"b\":1,\"c\":2}", "{\"a\":1,\"b\":2,\"c\":3}"},
       {"{}", "{\"a\":1}", "{\"a\":1,\"c\":2}", "{\"b\":1,\"d\":1}", "{\"b\":1 \"c\":2}"}},
      {R"({"type": "object", "properties": {"ab": {"type": "integer"}}, "additionalProperties": {"type": "string"}})",
       {"{}", "{\"ab\":1}", "{\"a\":\"x\"}", "{\"abc\":\"x\",\"\":\"y\"}", "{\"ab\":1,\"b\":\"x\"}",
        "{\"\xc3\xa4\":\"x\"}"},
       {"{\"ab\":\"x\"}", "{\"a\":1}", "{\"\\u0061b\":\"x\"}", "{\"b\":\"x\",\"ab\":1}"}},
      {R"({"type": "object"})", {"{}", "{\"x\":[1,{\"y\":null}]}"}, {"[]", "{\"x\"}", "{1:2}"}},
      {R"({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3})",
       {"[1]", "[1, 2]", "[1,2,3]", "[\n 1,\n 2\n]"},
       {"[]", "[1,2,3,4]", "[1,]", "[,1]", "[\"a\"]"}},
      {R"({"type": "array", "items": {"type": "boolean"}, "minItems": 2})",
       {"[true,false]", "[true,true,true]"},
       {"[]", "[true]"}},
      {R"({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": false, "minItems": 2})",
       {"[1,\"a\"]"},
       {"[1]", "[1,\"a\",2]", "[\"a\",1]"}},
      {R"({"type": "array"})", {"[]", "[1,\"a\",[],{}]"}, {"{}", "["}},
      {R"({"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#"}}]})",
       {"1", "[]", "[1,[2,[]]]"},
       {"\"a\"", "[[]", "[1,]"}},
      {R"({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {"v": {"type": "integer"},
           "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["v", "next"], "additionalProperties": false}}})",
       {"{\"v\":1,\"next\":null}", "{\"v\":1,\"next\":{\"v\":2,\"next\":null}}"},
       {"{\"v\":1}", "{\"v\":1,\"next\":{}}"}},
      {R"({"oneOf": [{"type": "object", "properties": {"k": {"const": "a"}, "x": {"type": "integer"}}, "required": ["k", "x"]},
                     {"type": "object", "properties": {"k": {"const": "b"}, "y": {"type": "integer"}}, "required": ["k", "y"]}]})",
       {"{\"k\":\"a\",\"x\":1}", "{\"k\":\"b\",\"y\":1}"},
       {"{\"k\":\"a\",\"y\":1}", "{\"k\":\"c\"}"}},
      {R"({"type": "integer", "minimum": -12, "maximum": 105})",
       {"-12", "-9", "0", "9", "99", "100", "105"},
       {"-13", "-20", "106", "110", "200", "1000", "-100"}},
      {R"({"type": "integer", "exclusiveMinimum": 0, "maximum": 10})", {"1", "10"}, {"0", "11", "-1"}},
      {R"({"type": "integer", "minimum": 1000})", {"1000", "9999", "123456"}, {"999", "-1000", "0"}},
      {R"({"type": "integer", "multipleOf": 7, "minimum": 1})", {"7", "14", "700"}, {"0", "1", "15", "-7"}},
      {R"({"type": "number", "minimum": 0.5, "exclusiveMaximum": 2.25})",
       {"0.5", "0.50", "1", "1.999", "2", "2.2", "2.2499"},
       {"0", "0.4", "0.49", "2.25", "2.3", "3", "-1", "1e0"}},
      {R"({"type": "number", "minimum": -1.5, "maximum": -0.25})",
       {"-1.5", "-1", "-0.25", "-0.3"},
       {"-1.51", "-2", "0", "-0.2", "-0"}},
      {R"({"type": "string", "minLength": 2, "maxLength": 3})",
       {"\"ab\"", "\"\xc3\xa4\xf0\x9f\x98\x80\\n\""},
       {"\"a\"", "\"abcd\"", "\"\""}},
      {R"({"type": "string", "pattern": "^[A-Z]{2}-\\d+(\\.[a-f]*)?$"})",
       {"\"AB-1\"", "\"ZZ-12.\"", "\"AB-1.af\""},
       {"\"A-1\"", "\"AB-\"", "\"AB-1.g\"", "\"xAB-1\""}},
      {R"({"type": "string", "pattern": "a|^b$"})", {"\"xay\"", "\"b\"", "\"a\""}, {"\"xb\"", "\"\""}},
      {R"({"type": "string", "pattern": "^[^\\d\"]+$"})",
       {"\"ab\"", "\"\\n\""},
       {"\"a1\"", "\"\\\"\"", "\"\""}},
      {R"({"type": "string", "pattern": "^\\w+(?:,\\s?\\w+){0,2}$"})",
       {"\"a\"", "\"a,b\"", "\"a, b, c\""},
       {"\"a,b,c,d\"", "\",\""}},
      {R"({"type": "string", "format": "date"})",
       {"\"2024-02-28\"", "\"1999-12-31\""},
       {"\"2024-02-30\"", "\"2024-13-01\"", "\"24-01-01\""}},
      {R"({"type": "string", "format": "ipv4"})", {"\"1.2.3.255\""}, {"\"1.2.3\"", "\"1.2.3.256\""}},
      {R"({"type": "string", "format": "uuid"})",
       {"\"123e4567-e89b-12d3-a456-426614174000\""},
       {"\"123e4567\""}},
      {R"({"title": "T", "description": "d", "type": "object", "properties": {"n": {"type": "array", "items": {"$ref": "#/$defs/p"}}},
           "required": ["n"], "additionalProperties": false, "$defs": {"p": {"type": "object", "properties": {"q\"\n": {"type": "boolean"}},
           "required": ["q\"\n"], "additionalProperties": false}}})",
       {"{\"n\":[]}", "{\"n\":[{\"q\\\"\\n\":true}]}"},
       {"{\"n\":[{}]}"}},
  };
  return all;
}

TEST(JsonGrammar, TakesWhatTheSchemaTakes) {
  for (const Case& c : cases()) {
    const auto grammar = compile(c.schema);
    for (const char* text : c.good) {
      EXPECT_TRUE(takes(grammar, text)) << c.schema << "\n" << text;
      const Json schema = Json::parse(c.schema);
      EXPECT_TRUE(test::valid(Json::parse(text), schema, schema)) << "the checker: " << c.schema << "\n"
                                                                  << text;
    }
    for (const char* text : c.bad) EXPECT_FALSE(takes(grammar, text)) << c.schema << "\n" << text;
  }
}

// Whatever is drawn is valid, at every budget that the shortest text fits in.
TEST(JsonGrammar, WhateverIsDrawnIsValid) {
  std::mt19937_64 random(7);
  for (const Case& c : cases()) {
    const auto grammar = compile(c.schema);
    const Json schema = Json::parse(c.schema);
    for (int i = 0; i < 40; ++i) {
      const int64_t budget = grammar->least() + static_cast<int64_t>(random() % 60);
      const std::string text = draw(grammar, budget, random);
      const Json value = Json::parse(text, nullptr, /*allow_exceptions=*/false);
      ASSERT_FALSE(value.is_discarded()) << c.schema << "\n" << text;
      EXPECT_TRUE(test::valid(value, schema, schema)) << c.schema << "\n" << text;
    }
  }
}

TEST(JsonGrammar, NamesWhatItDoesNotKnow) {
  const std::vector<std::pair<const char*, const char*>> all = {
      {R"({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": true}}})",
       "schema.properties.a.uniqueItems"},
      {R"({"type": "object", "patternProperties": {}})", "schema.patternProperties"},
      {R"({"not": {}})", "schema.not"},
      {R"({"type": "object", "properties": {"a": {"if": {}}}})", "schema.properties.a.if"},
      {R"({"requierd": []})", "schema.requierd"},
      {R"({"type": "king"})", "king"},
      {R"({"type": 5})", "schema.type"},
      {R"({"type": []})", "schema.type"},
      {R"({"$ref": "http://example.com/x"})", "schema.$ref"},
      {R"({"$ref": 5})", "schema.$ref: must be a text"},
      {R"({"anyOf": [{"$ref": null}]})", "schema.anyOf[0].$ref"},
      {R"({"$ref": "#/$defs/none"})", "#/$defs/none"},
      {R"({"$ref": "#"})", "no text fits"},
      {R"({"anyOf": []})", "schema.anyOf"},
      {R"({"anyOf": [{"type": "string"}], "minLength": 3})", "schema.minLength"},
      {R"({"oneOf": [{"type": "string"}, {"enum": ["a"]}]})", "schema.oneOf: branches 0 and 1"},
      {R"({"allOf": [{}, {}]})", "schema.allOf"},
      {R"s({"type": "string", "pattern": "(?=a)"})s", "looks around"},
      {R"({"type": "string", "pattern": "(a"})", "not closed"},
      {R"({"type": "string", "pattern": "\\bx"})", "\\b"},
      {R"s({"type": "string", "pattern": "((((a{1000}){1000}){1000}){1000})"})s", "nodes"},
      {R"({"type": "string", "format": "uri"})", "uri"},
      {R"({"type": "integer", "minimum": 5, "maximum": 4})", "no text fits"},
      {R"({"type": "number", "multipleOf": 0.1})", "multipleOf"},
      {R"({"type": "integer", "minimum": 1e30})", "schema.minimum"},
      {R"({"type": "array", "minItems": 3, "maxItems": 2})", "minItems"},
      {R"({"type": "array", "minItems": 5000})", "items"},
      {R"({"type": "array", "items": [{}]})", "prefixItems"},
      {R"({"type": "object", "required": ["x"], "additionalProperties": false})", "schema.required"},
      {R"({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]})", "no text fits"},
      {R"({"enum": []})", "no text fits"},
      {R"(false)", "no text fits"},
      {R"("text")", "a schema must be"},
  };
  for (const auto& [schema, named] : all) {
    try {
      compile(schema);
      ADD_FAILURE() << schema << " was taken";
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(named), std::string::npos) << schema << "\n" << e.what();
    }
  }
}

// A branch that can never end is not entered; one that refers to itself alone adds nothing.
TEST(JsonGrammar, LeavesOutWhatCannotEnd) {
  const auto endless = compile(R"({"anyOf": [{"$ref": "#/$defs/e"}, {"type": "null"}, {"$ref": "#"}],
      "$defs": {"e": {"type": "object", "properties": {"e": {"$ref": "#/$defs/e"}}, "required": ["e"]}}})");
  EXPECT_TRUE(takes(endless, "null"));
  EXPECT_FALSE(takes(endless, "{\"e\":null}"));
  TokenFilter filter(endless, trie(), 100);
  EXPECT_FALSE(filter.allows(fixture_tokenizer().encode("{")[0]));
}

// What an ambiguous pattern would cost is bounded: it is followed, or given up with an Error, in little time.
TEST(JsonGrammar, HostilePatternsEnd) {
  for (const char* pattern :
       {"(a|a)*b", "(a*)*", "((a?){30}){30}", "(.*a.*){40}", "^(([a-z])+.)+[A-Z]([a-z])+$"}) {
    std::mt19937_64 random(3);
    const Json schema = {{"type", "string"}, {"pattern", pattern}};
    try {
      draw(json_grammar(schema), 40, random);
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("ambiguous"), std::string::npos) << e.what();
    }
  }
}

TEST(JsonGrammar, TheBudgetIsKept) {
  const auto grammar = compile(R"({"type": "array", "items": {"type": "string"}, "minItems": 3})");
  std::mt19937_64 random(5);
  for (int64_t budget = grammar->least(); budget < grammar->least() + 30; ++budget) {
    int64_t used = 0;
    EXPECT_EQ(Json::parse(draw(grammar, budget, random, nullptr, &used)).size() >= 3, true);
    EXPECT_LE(used, budget);
  }
  // Too small a budget rules out nothing: the text is cut.
  TokenFilter filter(grammar, trie(), 2);
  EXPECT_TRUE(filter.allows(fixture_tokenizer().encode("[")[0]));
  EXPECT_FALSE(filter.hurried());
}

// Turns with tools and forms, drawn at random, are read by the parser without a fault and hold what they
// must.
TEST(TurnGrammar, TurnsAreWellFormedAndHoldWhatTheyMust) {
  const Json parameters =
      Json::parse(R"({"type": "object", "properties": {"a": {"type": "integer", "minimum": 3},
      "s & \"t\"": {"type": "string"}, "e": {"enum": ["x y", 4, null]}, "list": {"type": "array", "items": {"type": "number"}, "maxItems": 2},
      "u": {"anyOf": [{"type": "string", "pattern": "^[a-c]{2}$"}, {"type": "boolean"}]}, "any": {}}, "required": ["a", "e", "u"],
      "additionalProperties": false})");
  const Json schema = Json::parse(
      R"({"type": "object", "properties": {"r": {"type": "integer"}}, "required": ["r"], "additionalProperties": false})");
  std::mt19937_64 random(11);
  int with_calls = 0, with_text = 0;
  for (int i = 0; i < 400; ++i) {
    TurnFormat format;
    format.thinking = i % 2 == 0;
    format.response = static_cast<ResponseForm>(i / 2 % 3);
    if (format.response == ResponseForm::kJsonSchema) format.schema = schema;
    format.tool_use = static_cast<ToolUse>(i / 6 % 3);
    format.parallel_calls = i / 18 % 2 == 0;
    format.tools = {{.name = "f<\"&>", .parameters = parameters, .strict = true},
                    {.name = "free", .parameters = parameters, .strict = false}};
    const auto grammar = turn_grammar(format, fixture_tokenizer());
    std::vector<int32_t> ids;
    draw(grammar, grammar->least() + static_cast<int64_t>(random() % 300), random, &ids, nullptr,
         /*more=*/40);
    const ParsedTurn turn = parse_turn(fixture_tokenizer(), ids, format.thinking);
    EXPECT_TRUE(turn.complete);
    EXPECT_TRUE(turn.faults.empty()) << turn.faults[0] << "\n" << fixture_tokenizer().decode(ids);
    const std::string text = turn.message.content.empty() ? "" : turn.message.content[0].text;
    const auto& calls = turn.message.tool_calls;
    if (format.tool_use == ToolUse::kNone) {
      EXPECT_TRUE(calls.empty());
    }
    if (format.tool_use == ToolUse::kRequired) {
      EXPECT_FALSE(calls.empty());
    }
    if (!format.parallel_calls) {
      EXPECT_LE(calls.size(), 1u);
    }
    if (format.response != ResponseForm::kText && calls.empty()) {
      const Json value = Json::parse(text, nullptr, false);
      ASSERT_TRUE(value.is_object()) << text;
      if (!format.schema.is_null()) {
        EXPECT_TRUE(test::valid(value, schema, schema)) << text;
      }
      ++with_text;
    }
    for (const ChatToolCall& call : calls) {
      ++with_calls;
      const Json arguments = Json::parse(call.arguments, nullptr, false);
      ASSERT_TRUE(arguments.is_object()) << call.arguments;
      EXPECT_TRUE(call.name == "free" || call.name == "f<\"&>") << call.name;
      if (call.name != "free") {
        EXPECT_TRUE(test::valid(arguments, parameters, parameters)) << call.arguments;
      }
    }
  }
  EXPECT_GT(with_calls, 50);
  EXPECT_GT(with_text, 50);
}

// States are dropped when there are many; what is allowed stays the same.
TEST(TokenFilter, GoesOnAfterItForgets) {
  const auto grammar = compile(
      R"({"type": "array", "items": {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 300}}})");
  std::mt19937_64 random(13);
  const std::string text = draw(grammar, 3000, random);
  EXPECT_TRUE(Json::parse(text).is_array());
}

}  // namespace
}  // namespace godwit
