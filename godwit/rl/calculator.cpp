#include <algorithm>

#include "godwit/rl/environments.h"
#include "godwit/rl/tool_environment.h"

namespace godwit::rl {
namespace {

using nlohmann::json;

struct Options {
  int64_t steps = 2, largest = 20, turns = 12;
  double failure = 0.25, give_up = 0, twice = 0;
};

int64_t apply(int64_t a, const std::string& op, int64_t b) {
  if (op == "+") return a + b;
  return op == "-" ? a - b : a * b;
}

// World: start, ops, operands of the chain, values: what stands before each step; value and at: how far the
// tool's answers have come; failed: whether the last call did; gives_up, twice: of the demonstration.
class Calculator final : public ToolEnvironment {
 public:
  explicit Calculator(const Options& options)
      : ToolEnvironment({.turns = options.turns}), options_(options) {}

  std::unique_ptr<ChatMessage> demonstrate() override {
    const auto at = world.at("at").get<size_t>();
    if (at > asked_twice_) {  // the call that brought it here, once more
      asked_twice_ = at;
      if (world.at("twice")[at - 1])
        return std::make_unique<ChatMessage>(call_of(at - 1, world.at("values")[at - 1]));
    }
    if (at == world.at("ops").size() || (world.at("failed") && world.at("gives_up")))
      return std::make_unique<ChatMessage>(assistant_says(std::to_string(world.at("value").get<int64_t>())));
    return std::make_unique<ChatMessage>(call_of(at, world.at("value")));
  }

 private:
  ChatMessage call_of(size_t step, const json& a) const {
    return assistant_calls("calc",
                           {{"a", a}, {"op", world.at("ops")[step]}, {"b", world.at("operands")[step]}});
  }

  Task begin(Draws& draws) override {
    const char* const kOps[] = {"+", "-", "*"};
    int64_t value = draws.between(1, options_.largest);
    std::string text = "Compute " + std::to_string(value);
    world = {{"start", value}, {"value", value}, {"at", 0}, {"failed", false}};
    asked_twice_ = 0;
    for (int64_t i = 0; i < options_.steps; ++i) {
      const char* op = kOps[draws.below(3)];
      const int64_t operand = draws.between(1, op[0] == '*' ? 9 : options_.largest);
      world["ops"].push_back(op);
      world["operands"].push_back(operand);
      world["values"].push_back(value);
      text += std::string(" ") + op + " " + std::to_string(operand);
      value = apply(value, op, operand);
    }
    world["answer"] = value;
    world["gives_up"] = draws.chance(options_.give_up);
    for (int64_t i = 0; i < options_.steps; ++i) world["twice"].push_back(draws.chance(options_.twice));
    const json tools = json::array({tool_declaration(
        "calc", "a op b, op one of + - *", {{"a", "integer"}, {"op", "string"}, {"b", "integer"}})});
    return {.messages = {user_says(text + ", from left to right.")}, .tools = tools.dump(), .base_tokens = 0};
  }

  ToolAnswer call(const std::string& tool, const json& arguments, Draws& draws) override {
    if (tool != "calc") return {.text = "error: there is no tool " + tool, .wrong = true};
    const int64_t a = arguments.at("a").get<int64_t>(), b = arguments.at("b").get<int64_t>();
    const auto op = arguments.at("op").get<std::string>();
    constexpr int64_t kMost = 1000000000;
    if ((op != "+" && op != "-" && op != "*") || std::abs(a) > kMost || std::abs(b) > kMost)
      return {.text = "error: a op b, op one of + - *", .wrong = true};
    const auto at = world.at("at").get<size_t>();
    const bool next = at < world.at("ops").size() && a == world.at("value") &&
                      op == world.at("ops")[at].get<std::string>() && b == world.at("operands")[at];
    if (draws.chance(options_.failure)) {
      world["failed"] = true;
      return {.text = "error: busy, try again", .fault = true};
    }
    world["failed"] = false;
    if (next) {
      world["at"] = at + 1;
      world["value"] = apply(a, op, b);
    }
    return {.text = std::to_string(apply(a, op, b)), .checked = true, .valid = next};
  }

  Reply respond(const std::string& text) override {
    int64_t value = 0;
    return {.success = read_integer(text, value) && value == world.at("answer") ? 1.0 : 0.0};
  }

  Options options_;
  size_t asked_twice_ = 0;  // steps of the chain that demonstrate() has come to know of
};

}  // namespace

std::unique_ptr<Environment> make_calculator(const json& options) {
  check_options("calculator", options, {"steps", "largest", "turns", "failure", "give_up", "twice"});
  Options o;
  o.steps = options.value("steps", o.steps);
  o.largest = std::max<int64_t>(1, options.value("largest", o.largest));
  o.turns = options.value("turns", o.turns);
  o.failure = options.value("failure", o.failure);
  o.give_up = options.value("give_up", o.give_up);
  o.twice = options.value("twice", o.twice);
  return std::make_unique<Calculator>(o);
}

}  // namespace godwit::rl
