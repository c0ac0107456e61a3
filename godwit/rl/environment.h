// What a model acts in. An episode: reset to a task, then turns; each assistant's turn gets what follows it
// (results of tools, or a user's next words) until the environment says that it is over and what it was
// worth.
//
// Everything an environment does is a function of its options, the seed of its task and the turns so far; its
// state can be saved and loaded, so that a run goes on bit for bit.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "godwit/text/chat_format.h"

namespace godwit::rl {

struct Task {
  std::vector<ChatMessage> messages = {};  // how the conversation begins
  std::string tools = {};                  // a JSON list, as ChatOptions::tools
  int64_t base_tokens = 0;  // b0: what a model may write for it at budget factor 1; 0 = no budget
  std::string fault = {};   // not empty: the environment has failed, and why; the episode is over
};

struct StepResult {
  std::vector<ChatMessage> messages = {};  // what comes next, before the assistant's next turn
  double reward = 0;                       // of this turn alone; the hidden verifier's word comes with `done`
  int64_t calls = 0;                       // of tools in this turn; of these:
  int64_t faults = 0;                      //   the tool failed, through no fault of the model's
  int64_t wrong = 0;                       //   not as the tool wants them
  int64_t redundant = 0;                   //   told or changed nothing new
  int64_t checked = 0, valid = 0;          // intermediate steps that were judged, and found right
  bool done = false;
  double success = 0;       // with done: 0 to 1
  std::string reason = {};  // with done: in a word or a line
};

class Environment {
 public:
  virtual ~Environment() = default;

  virtual Task reset(uint64_t seed) = 0;

  // `turn`: calls have ids, which results must name. Never throws for what a model wrote.
  virtual StepResult step(const ChatMessage& turn) = 0;

  // After load on a new object with the same options, step goes on as here.
  virtual std::string save() const = 0;
  virtual void load(std::string_view saved) = 0;

  // Of what matters for the next decision: equal states form the step groups of turn-level credit.
  virtual uint64_t state_hash() const = 0;

  // The turn that a scripted expert would take now, for demonstrations; nullptr where there is none.
  virtual std::unique_ptr<ChatMessage> demonstrate() { return nullptr; }
};

// `options` is an object of the environment's own keys; one that it does not know is an error.
using EnvironmentFactory = std::function<std::unique_ptr<Environment>(const nlohmann::json& options)>;

void register_environment(const std::string& name, EnvironmentFactory factory);
std::unique_ptr<Environment> make_environment(const std::string& name, const nlohmann::json& options);
std::vector<std::string> environment_names();

}  // namespace godwit::rl
