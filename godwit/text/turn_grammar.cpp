#include "godwit/text/turn_grammar.h"

#include "godwit/base/check.h"
#include "godwit/text/json_grammar.h"

namespace godwit {
namespace {

class Turn {
 public:
  Turn(const TurnFormat& format, const Tokenizer& tokenizer)
      : format_(format),
        marks_{mark(tokenizer, kOpen), mark(tokenizer, kClose), mark(tokenizer, kSep)},
        end_(mark(tokenizer, kEndOfMsg)),
        json_(*grammar_) {}

  std::shared_ptr<const Grammar> make() {
    check(format_.tool_use != ToolUse::kRequired || !format_.tools.empty(),
          "tool_choice: there is no tool to call");
    Grammar& g = *grammar_;
    const int32_t rule = g.add_rule("the turn");
    int32_t at = g.start(rule);
    if (format_.thinking) {
      at = any_text(at);
      at = open(close(at, "think"), "response");
    }
    const int32_t last = g.add_node();
    const bool tools = format_.tool_use != ToolUse::kNone && !format_.tools.empty();
    if (format_.tool_use != ToolUse::kRequired) {
      const int32_t said = close_last(response(at), "response");
      g.skip(said, last);
      if (tools && format_.response == ResponseForm::kText) g.skip(calls(said), last);
    }
    // Nothing but calls.
    const bool text_too = format_.tool_use != ToolUse::kRequired && format_.response == ResponseForm::kText;
    if (tools && !text_too) g.skip(calls(close(at, "response")), last);
    g.set_cost(0);
    g.accept(g.special(close(last, "message"), end_));
    g.set_cost(1);
    json_.finish();
    g.finish(rule);
    return grammar_;
  }

 private:
  static int32_t mark(const Tokenizer& tokenizer, std::string_view name) {
    return tokenizer.special_id(name) - tokenizer.ranks();
  }

  int32_t tag(int32_t from, int32_t mark, std::string_view text) {
    return grammar_->special(grammar_->literal(grammar_->special(from, mark), text), marks_.sep);
  }
  int32_t open(int32_t from, std::string_view text) { return tag(from, marks_.open, text); }
  int32_t close(int32_t from, std::string_view text) { return tag(from, marks_.close, text); }

  // The end of what nothing has to follow: cut there, the turn is whole all the same (ChatParser closes it).
  int32_t close_last(int32_t from, std::string_view text) {
    grammar_->set_cost(0);
    const int32_t out = close(from, text);
    grammar_->set_cost(1);
    return out;
  }

  // What is not UTF-8 is the parser's to mend, as in turns without a grammar.
  int32_t any_text(int32_t from) {
    const int32_t loop = grammar_->add_node();
    grammar_->skip(from, loop);
    grammar_->edge(loop, 0, 255, loop);
    return loop;
  }

  int32_t response(int32_t from) {
    switch (format_.response) {
      case ResponseForm::kText:
        return any_text(from);
      case ResponseForm::kJsonObject:
        return grammar_->call(from, json_.any_object());
      case ResponseForm::kJsonSchema:
        return grammar_->call(from, json_.schema(format_.schema, "schema"));
    }
    return from;
  }

  int32_t calls(int32_t from) {
    Grammar& g = *grammar_;
    const int32_t channel = open(from, "tools"), behind_call = g.add_node();
    static const TurnFormat::Json anything = {{"type", "object"}};
    for (const TurnFormat::Tool& tool : format_.tools) {
      const bool free = !tool.strict || tool.parameters.is_null();
      const int32_t arguments = json_.arguments(free ? anything : tool.parameters,
                                                fmt::format("tools.{}.parameters", tool.name), marks_);
      int32_t at = g.literal(g.special(channel, marks_.open),
                             fmt::format("call tool=\"{}\" index=\"", xtml_attribute(tool.name)));
      const int32_t digits = g.add_node();
      g.edge(at, '1', '9', digits);
      const int32_t tens = g.add_node();
      g.edge(digits, '0', '9', tens);
      at = g.literal(digits, "\"");
      g.skip(g.literal(tens, "\""), at);
      at = g.call(g.special(at, marks_.sep), arguments);
      g.skip(close_last(at, "call"), behind_call);
    }
    if (format_.parallel_calls) g.skip(behind_call, channel);
    return close_last(behind_call, "tools");
  }

  const TurnFormat& format_;
  JsonGrammar::Marks marks_;
  int32_t end_;
  std::shared_ptr<Grammar> grammar_ = std::make_shared<Grammar>();
  JsonGrammar json_;
};

}  // namespace

std::shared_ptr<const Grammar> turn_grammar(const TurnFormat& format, const Tokenizer& tokenizer) {
  return Turn(format, tokenizer).make();
}

std::shared_ptr<const Grammar> json_grammar(const nlohmann::ordered_json& schema) {
  const auto grammar = std::make_shared<Grammar>();
  JsonGrammar json(*grammar);
  const int32_t rule = json.schema(schema, "schema");
  json.finish();
  grammar->finish(rule);
  return grammar;
}

}  // namespace godwit
