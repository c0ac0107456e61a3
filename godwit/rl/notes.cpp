#include <algorithm>

#include "godwit/rl/environments.h"
#include "godwit/rl/tool_environment.h"

namespace godwit::rl {
namespace {

using nlohmann::json;

const char* const kNames[] = {"Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana"};
constexpr int64_t kNameCount = 8;

struct Options {
  int64_t facts = 2, gap = 4, turns = 64;
  double keep = 0.5;
};

// World: script of what the user says, each {say, name, code, ask}; at: where the script stands; notes;
// right: answers so far that were right.
class Notes final : public ToolEnvironment {
 public:
  explicit Notes(const Options& options) : ToolEnvironment({.turns = options.turns}), options_(options) {}

  std::unique_ptr<ChatMessage> demonstrate() override {
    const json& now = world.at("script")[world.at("at").get<size_t>()];
    const std::string name = now.value("name", ""), code = now.value("code", "");
    const bool noted = world.at("notes").contains(name);
    if (world.at("keeps") && !name.empty() && !now.at("ask") && !noted)
      return std::make_unique<ChatMessage>(assistant_calls("write_note", {{"key", name}, {"value", code}}));
    if (now.at("ask") && noted && !world.at("read").contains(name))
      return std::make_unique<ChatMessage>(assistant_calls("read_note", {{"key", name}}));
    return std::make_unique<ChatMessage>(assistant_says(now.at("ask") ? code : "ok"));
  }

 private:
  Task begin(Draws& draws) override {
    json facts = json::array(), script = json::array();
    for (int64_t i = 0; i < options_.facts; ++i) {
      const std::string name = kNames[i % kNameCount], code = std::to_string(draws.between(100, 999));
      facts.push_back({{"name", name}, {"code", code}});
      script.push_back({{"say", "The code of " + name + " is " + code + "."},
                        {"name", name},
                        {"code", code},
                        {"ask", false}});
    }
    for (int64_t i = 0; i < options_.gap; ++i)
      script.push_back(
          {{"say", "Note " + std::to_string(draws.between(100, 999)) + " is of no matter."}, {"ask", false}});
    for (int64_t i = 0; i < options_.facts; ++i) {
      const json& fact = facts[static_cast<size_t>((i + 1) % options_.facts)];
      script.push_back({{"say", "What is the code of " + fact.at("name").get<std::string>() + "?"},
                        {"name", fact.at("name")},
                        {"code", fact.at("code")},
                        {"ask", true}});
    }
    world = {{"script", script},       {"at", 0},    {"notes", json::object()},
             {"read", json::object()}, {"right", 0}, {"keeps", draws.chance(options_.keep)}};
    const json tools =
        json::array({tool_declaration("write_note", "keep a value", {{"key", "string"}, {"value", "string"}}),
                     tool_declaration("read_note", "a value kept before", {{"key", "string"}})});
    return {.messages = {user_says(script[0].at("say"))}, .tools = tools.dump(), .base_tokens = 0};
  }

  ToolAnswer call(const std::string& tool, const json& arguments, Draws&) override {
    const auto key = arguments.at("key").get<std::string>();
    const json& now = world.at("script")[world.at("at").get<size_t>()];
    if (tool == "write_note") {
      const auto value = arguments.at("value").get<std::string>();
      world["notes"][key] = value;
      return {.text = "kept",
              .checked = true,
              .valid = now.value("name", "") == key && now.value("code", "") == value};
    }
    if (tool != "read_note") return {.text = "error: there is no tool " + tool, .wrong = true};
    if (!world.at("notes").contains(key)) return {.text = "error: no such note", .wrong = true};
    world["read"][key] = true;
    return {.text = world.at("notes").at(key).get<std::string>(),
            .checked = true,
            .valid = now.at("ask").get<bool>() && now.value("name", "") == key};
  }

  Reply respond(const std::string& text) override {
    const auto at = world.at("at").get<size_t>();
    const json& now = world.at("script")[at];
    double reward = 0;
    if (now.at("ask")) {
      int64_t value = 0;
      const bool right =
          read_integer(text, value) && std::to_string(value) == now.at("code").get<std::string>();
      world["right"] = world.at("right").get<int64_t>() + (right ? 1 : 0);
      reward = right ? 1.0 / static_cast<double>(options_.facts) : 0.0;
    }
    world["at"] = at + 1;
    world["read"] = json::object();
    if (at + 1 < world.at("script").size())
      return {.next = world.at("script")[at + 1].at("say"), .done = false, .reward = reward};
    return {.success = world.at("right") == options_.facts ? 1.0 : 0.0, .reward = reward};
  }

  Options options_;
};

}  // namespace

std::unique_ptr<Environment> make_notes(const json& options) {
  check_options("notes", options, {"facts", "gap", "turns", "keep"});
  Options o;
  o.facts = std::clamp<int64_t>(options.value("facts", o.facts), 1, kNameCount);
  o.gap = options.value("gap", o.gap);
  o.turns = options.value("turns", 4 * (2 * o.facts + o.gap));
  o.keep = options.value("keep", o.keep);
  return std::make_unique<Notes>(o);
}

}  // namespace godwit::rl
