// "process": an environment that is any program speaking JSON lines, in a sandbox. docs/rl.md has the
// protocol.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "godwit/base/check.h"
#include "godwit/io/jsonl.h"
#include "godwit/rl/environments.h"
#include "godwit/rl/sandbox.h"
#include "godwit/rl/tool_environment.h"
#include "godwit/text/chat_json.h"

namespace godwit::rl {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

struct Options {
  std::vector<std::string> command;
  std::string folder;
  json pass = json::object();
  double answer_s = 10;
  int64_t turns = 64;
  bool weaker = false;
  SandboxLimits limits;
};

class ProcessEnvironment final : public Environment {
 public:
  explicit ProcessEnvironment(Options options) : options_(std::move(options)) {}

  Task reset(uint64_t seed) override {
    seed_ = seed;
    turns_ = json::array();
    answers_ = hash_text("");
    done_ = false;
    process_.reset();
    Task task;
    json answer;
    task.fault = ask({{"reset", seed}, {"options", options_.pass}}, answer);
    if (task.fault.empty()) task.fault = read_task(answer, task);
    if (!task.fault.empty()) end();
    return task;
  }

  StepResult step(const ChatMessage& turn) override {
    check(!done_, "environment: a step after the end of the episode");
    const json written = json::parse(message_to_json(turn).dump());
    turns_.push_back(written);
    json answer;
    StepResult result;
    std::string fault = ask({{"turn", written}}, answer);
    if (fault.empty()) fault = read_step(turn, answer, result);
    if (!fault.empty()) result = {.done = true, .success = 0, .reason = fault};
    if (!result.done && static_cast<int64_t>(turns_.size()) >= options_.turns) {
      result.messages.clear();
      result.done = true;
      result.reason = "turns";
    }
    if (result.done) end();
    return result;
  }

  // The program's state is a function of the seed and the turns: it is brought back by going through them
  // again.
  std::string save() const override {
    return json{{"seed", seed_}, {"turns", turns_}, {"answers", answers_}, {"done", done_}}.dump();
  }

  void load(std::string_view saved) override {
    const json state = json::parse(saved);
    reset(state.at("seed"));
    for (const json& turn : state.at("turns")) {
      if (done_) break;
      const auto list = ordered_json::array({ordered_json::parse(turn.dump())});
      step(messages_from_json(list).at(0));
    }
    // One that is not reproducible ends its episode with its next step.
    if (answers_ != state.at("answers").get<uint64_t>()) process_.reset();
    lost_ = answers_ != state.at("answers").get<uint64_t>();
    answers_ = state.at("answers");
    done_ = state.at("done");
  }

  uint64_t state_hash() const override {
    return state_.empty() ? hash_text(std::to_string(seed_) + turns_.dump()) : hash_text(state_);
  }

 private:
  void end() {
    done_ = true;
    process_.reset();
  }

  // Sends a line and parses the answer. What went wrong, in words, or nothing.
  std::string ask(const json& question, json& answer) {
    if (lost_) return "environment: after a resume it answered differently";
    try {
      if (!process_ && turns_.empty())
        process_.emplace(options_.command, options_.folder, options_.limits, options_.weaker);
    } catch (const Error& error) {
      if (!started_) throw;  // the run's own mistake: a program that is not there
      return std::string("environment: ") + error.what();
    }
    started_ = true;
    if (!process_) return "environment: it has ended";
    std::string line;
    switch (process_->ask(question.dump(-1, ' ', false, json::error_handler_t::replace), options_.answer_s,
                          line)) {
      case Sandbox::Answer::kTimeout:
        return "environment: no answer in time";
      case Sandbox::Answer::kFlood:
        return "environment: an answer without end";
      case Sandbox::Answer::kEnded:
        return "environment: the program " + process_->ending();
      case Sandbox::Answer::kLine:
        break;
    }
    answers_ = hash_text(std::to_string(answers_) + line);
    try {
      io::check_nesting(line, "environment: the answer");
    } catch (const Error& error) {
      return error.what();
    }
    answer = json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!answer.is_object()) return "environment: the answer is no JSON object";
    state_ = answer.contains("state") ? answer.at("state").dump() : "";
    return "";
  }

  static std::vector<ChatMessage> messages_of(const json& answer) {
    return messages_from_json(ordered_json::parse(answer.value("messages", json::array()).dump()));
  }

  static std::string read_task(const json& answer, Task& task) {
    try {
      task.messages = messages_of(answer);
      if (task.messages.empty()) return "environment: a task without messages";
      if (answer.contains("tools")) task.tools = answer.at("tools").dump();
      task.base_tokens = answer.value("base_tokens", int64_t{0});
    } catch (const std::exception& e) {
      return std::string("environment: a malformed task: ") + e.what();
    }
    return "";
  }

  static constexpr int64_t kMost = 1'000'000;

  // It is kept with every episode: one line, at most 200 bytes of it.
  static std::string short_reason(std::string reason) {
    if (reason.size() > 200) {
      size_t end = 200;
      while (end > 0 && (static_cast<unsigned char>(reason[end]) & 0xC0) == 0x80) --end;  // whole characters
      reason.resize(end);
    }
    for (char& c : reason)
      if (static_cast<unsigned char>(c) < 32 || c == 127) c = ' ';
    return reason;
  }

  static std::string read_step(const ChatMessage& turn, const json& answer, StepResult& result) {
    try {
      result.messages = messages_of(answer);
      result.done = answer.value("done", false);
      result.reward = answer.value("reward", 0.0);
      result.success = std::clamp(answer.value("success", 0.0), 0.0, 1.0);
      result.calls = static_cast<int64_t>(turn.tool_calls.size());
      result.faults = answer.value("faults", int64_t{0});
      result.wrong = answer.value("wrong", int64_t{0});
      result.redundant = answer.value("redundant", int64_t{0});
      result.checked = answer.value("checked", int64_t{0});
      result.valid = answer.value("valid", int64_t{0});
      result.reason = short_reason(answer.value("reason", std::string(result.done ? "finished" : "")));
      if (!(std::abs(result.reward) <= kMost)) return "environment: a reward beyond a million";
      for (const int64_t count :
           {result.faults, result.wrong, result.redundant, result.checked, result.valid})
        if (count < 0 || count > kMost) return "environment: a count below 0 or beyond a million";
      if (!result.done && result.messages.empty()) return "environment: neither an end nor a message";
      for (ChatMessage& m : result.messages)
        if (m.role == ChatRole::kAssistant) return "environment: it speaks for the assistant";
    } catch (const std::exception& e) {
      return std::string("environment: a malformed answer: ") + e.what();
    }
    return "";
  }

  Options options_;
  std::optional<Sandbox> process_;
  uint64_t seed_ = 0;
  json turns_ = json::array();  // what the model wrote
  uint64_t answers_ = 0;        // hash of all answers
  std::string state_;           // what the program calls its state
  bool done_ = false, started_ = false, lost_ = false;
};

}  // namespace

std::unique_ptr<Environment> make_process(const json& options) {
  check_options("process", options,
                {"command", "folder", "options", "answer_s", "turns", "weaker", "cpu_s", "memory_mb",
                 "work_mb", "processes", "line_mb"});
  Options o;
  o.command = options.value("command", o.command);
  check(!o.command.empty(), "environment process: command is missing");
  o.folder = options.value("folder", o.folder);
  o.pass = options.value("options", o.pass);
  o.answer_s = options.value("answer_s", o.answer_s);
  o.turns = options.value("turns", o.turns);
  o.weaker = options.value("weaker", o.weaker);
  o.limits.cpu_s = options.value("cpu_s", o.limits.cpu_s);
  o.limits.memory_bytes = options.value("memory_mb", o.limits.memory_bytes >> 20) << 20;
  o.limits.work_bytes = options.value("work_mb", o.limits.work_bytes >> 20) << 20;
  o.limits.line_bytes = options.value("line_mb", o.limits.line_bytes >> 20) << 20;
  o.limits.processes = options.value("processes", o.limits.processes);
  check(o.limits.processes >= 1 && o.limits.processes <= 256 && o.limits.memory_bytes > 0 &&
            o.limits.work_bytes > 0,
        "environment process: processes must be 1 to 256, memory_mb and work_mb positive");
  return std::make_unique<ProcessEnvironment>(std::move(o));
}

}  // namespace godwit::rl
