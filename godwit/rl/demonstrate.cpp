#include "godwit/rl/demonstrate.h"

#include <nlohmann/json.hpp>

#include "godwit/base/check.h"
#include "godwit/text/chat_json.h"

namespace godwit::rl {
namespace {

constexpr int64_t kMostTurns = 10000;

void append(std::vector<ChatMessage>& to, std::vector<ChatMessage> from) {
  for (ChatMessage& message : from) to.push_back(std::move(message));
}

}  // namespace

Demonstration demonstrate(Environment& environment, uint64_t seed) {
  Task task = environment.reset(seed);
  Demonstration out;
  out.tools = std::move(task.tools);
  append(out.messages, std::move(task.messages));
  int64_t calls = 0;
  for (int64_t turn = 0; turn < kMostTurns; ++turn) {
    const auto taken = environment.demonstrate();
    check(taken != nullptr, "this environment has no scripted expert to demonstrate it");
    for (ChatToolCall& call : taken->tool_calls) call.id = "call_" + std::to_string(calls++);
    StepResult result = environment.step(*taken);
    out.messages.push_back(*taken);
    append(out.messages, std::move(result.messages));
    out.calls += result.calls;
    out.faults += result.faults;
    if (!result.done) continue;
    out.success = result.success;
    return out;
  }
  fail("the scripted expert has not come to an end in {} turns", kMostTurns);
}

nlohmann::ordered_json to_json(const Demonstration& demonstration) {
  nlohmann::ordered_json out = {{"messages", nlohmann::ordered_json::array()}};
  for (const ChatMessage& message : demonstration.messages)
    out["messages"].push_back(message_to_json(message));
  if (!demonstration.tools.empty()) out["tools"] = nlohmann::ordered_json::parse(demonstration.tools);
  out["thinking"] = false;
  return out;
}

}  // namespace godwit::rl
