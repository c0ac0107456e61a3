// An environment made of a world, which is one JSON object, and tools that look at it or change it. A new one
// says how a task begins, what each tool does, and what an answer is worth; counting, limits, saving and
// hashing are here.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "godwit/rl/environment.h"

namespace godwit::rl {

// Draws that go on after a load: a counter and a seed.
class Draws {
 public:
  explicit Draws(uint64_t seed = 0, uint64_t counter = 0) : seed_(seed), counter_(counter) {}
  uint64_t bits();
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool chance(double p) { return static_cast<double>(bits() >> 11) * 0x1.0p-53 < p; }
  uint64_t seed() const { return seed_; }
  uint64_t counter() const { return counter_; }

 private:
  uint64_t seed_, counter_;
};

struct ToolAnswer {
  std::string text = {};
  bool fault = false;  // the tool failed
  bool wrong = false;  // the call was not as it should be
  bool checked = false, valid = false;
  bool done = false;
  double success = 0, reward = 0;
};

// What follows a turn without calls.
struct Reply {
  std::string next = {};  // the user's next words, where the conversation goes on
  bool done = true;
  double success = 0, reward = 0;
};

struct ToolLimits {
  int64_t turns = 16;  // of the assistant
  int64_t calls = 8;   // in one turn; more are refused
};

class ToolEnvironment : public Environment {
 public:
  explicit ToolEnvironment(ToolLimits limits) : limits_(limits) {}

  Task reset(uint64_t seed) final;
  StepResult step(const ChatMessage& turn) final;
  std::string save() const final;
  void load(std::string_view saved) final;
  uint64_t state_hash() const override;

 protected:
  // Fills `world` and says how the conversation begins.
  virtual Task begin(Draws& draws) = 0;
  // `arguments` is an object. May change the world.
  virtual ToolAnswer call(const std::string& tool, const nlohmann::json& arguments, Draws& draws) = 0;
  virtual Reply respond(const std::string& text) = 0;

  nlohmann::json world = {};

 private:
  ToolAnswer answer(const ChatToolCall& call, StepResult& result);

  ToolLimits limits_;
  Draws draws_;
  int64_t turns_ = 0;
  bool done_ = false;
  std::set<std::string> told_;  // calls answered since the world last changed
};

// Helpers for tools and answers.
uint64_t hash_text(std::string_view text);
std::string text_of(const ChatMessage& message);
ChatMessage user_says(std::string text);
ChatMessage assistant_says(std::string text);
ChatMessage assistant_calls(const std::string& tool, const nlohmann::ordered_json& arguments);
// One tool's declaration: parameters as {"name": "type"}, all of them required.
nlohmann::json tool_declaration(const std::string& name, const std::string& description,
                                const nlohmann::json& parameters);
// The only integer in a text, as its digits stand there; none or several: false.
bool read_integer(std::string_view text, int64_t& value);
// Throws Error for a key of `options` that is not in `known`.
void check_options(const std::string& environment, const nlohmann::json& options,
                   const std::vector<std::string>& known);

}  // namespace godwit::rl
