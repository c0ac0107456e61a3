// "files": a shell script with a mistake, tools to read and change it, and hidden tests that run it in a
// sandbox.
#include <stdlib.h>

#include <filesystem>

#include "godwit/base/check.h"
#include "godwit/base/file.h"
#include "godwit/rl/environments.h"
#include "godwit/rl/sandbox.h"
#include "godwit/rl/tool_environment.h"

namespace godwit::rl {
namespace {

using nlohmann::json;

struct Options {
  int64_t submissions = 2, turns = 12;
  double guess = 0;
  bool weaker = false;
};

// What a script should print for the numbers a and b, the right expression and wrong ones.
struct Job {
  const char* name;
  const char* does;
  const char* right;
  std::vector<const char*> wrong;
  int64_t (*value)(int64_t a, int64_t b);
};

const std::vector<Job>& jobs() {
  static const std::vector<Job> all = {
      {"sum",
       "the sum of its two arguments",
       "$1 + $2",
       {"$1 - $2", "$1 + $1", "$2 + $2"},
       [](int64_t a, int64_t b) { return a + b; }},
      {"difference",
       "its first argument minus its second",
       "$1 - $2",
       {"$2 - $1", "$1 + $2", "$1 - $1"},
       [](int64_t a, int64_t b) { return a - b; }},
      {"product",
       "the product of its two arguments",
       "$1 * $2",
       {"$1 + $2", "$1 * $1", "$2 * $2"},
       [](int64_t a, int64_t b) { return a * b; }},
      {"rest",
       "the rest of its first argument by its second",
       "$1 % $2",
       {"$1 / $2", "$2 % $1", "$1 * $2"},
       [](int64_t a, int64_t b) { return a % b; }},
  };
  return all;
}

std::string script(const char* expression) {
  return std::string("echo $(( ") + expression + " ))\n";
}

// A folder in the system's temporary place that goes away.
class Scratch {
 public:
  Scratch() : path_((std::filesystem::temp_directory_path() / "godwit-files-XXXXXX").string()) {
    check(::mkdtemp(path_.data()) != nullptr, "environment files: cannot create {}", path_);
    std::filesystem::permissions(path_, std::filesystem::perms(0755));
  }
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// World: job, wrong (the mistake), files (name -> text), left (submissions), inputs of the hidden tests.
class Files final : public ToolEnvironment {
 public:
  explicit Files(const Options& options) : ToolEnvironment({.turns = options.turns}), options_(options) {}

  std::unique_ptr<ChatMessage> demonstrate() override {
    const Job& job = jobs()[world.at("job").get<size_t>()];
    const std::string name = std::string(job.name) + ".sh";
    if (!world.at("read").get<bool>())
      return std::make_unique<ChatMessage>(assistant_calls("read_file", {{"path", name}}));
    const std::string wanted = script(world.at("guesses").get<bool>() ? job.wrong[0] : job.right);
    if (world.at("files").at(name) != wanted && !world.at("written").get<bool>())
      return std::make_unique<ChatMessage>(assistant_calls("write_file", {{"path", name}, {"text", wanted}}));
    return std::make_unique<ChatMessage>(assistant_calls("submit", json::object()));
  }

 private:
  Task begin(Draws& draws) override {
    const auto index = static_cast<size_t>(draws.below(static_cast<int64_t>(jobs().size())));
    const Job& job = jobs()[index];
    const char* wrong = job.wrong[static_cast<size_t>(draws.below(static_cast<int64_t>(job.wrong.size())))];
    const std::string name = std::string(job.name) + ".sh";
    world = {{"job", index},
             {"files", {{name, script(wrong)}}},
             {"left", options_.submissions},
             {"read", false},
             {"written", false},
             {"guesses", draws.chance(options_.guess)},
             {"tests", json::array()}};
    // Numbers that tell the right expression from every wrong one.
    while (world.at("tests").size() < 3) {
      const int64_t a = draws.between(11, 60), b = draws.between(3, 10);
      world["tests"].push_back({a, b});
    }
    const json tools = json::array(
        {tool_declaration("read_file", "the text of a file", {{"path", "string"}}),
         tool_declaration("write_file", "replace a file", {{"path", "string"}, {"text", "string"}}),
         tool_declaration("submit", "run the hidden tests", json::object())});
    return {
        .messages = {user_says(name + " should print " + job.does + ". It does not. Repair it and submit; " +
                               std::to_string(options_.submissions) + " submissions.")},
        .tools = tools.dump(),
        .base_tokens = 0};
  }

  ToolAnswer call(const std::string& tool, const json& arguments, Draws&) override {
    if (tool == "submit") return submit();
    if (tool != "read_file" && tool != "write_file")
      return {.text = "error: there is no tool " + tool, .wrong = true};
    const auto path = arguments.at("path").get<std::string>();
    if (!world.at("files").contains(path)) return {.text = "error: there is no such file", .wrong = true};
    if (tool == "read_file") {
      world["read"] = true;
      return {.text = world.at("files").at(path).get<std::string>()};
    }
    const auto text = arguments.at("text").get<std::string>();
    constexpr size_t kMostBytes = 4096;
    if (text.size() > kMostBytes) return {.text = "error: too long", .wrong = true};
    world["files"][path] = text;
    world["written"] = true;
    return {.text = "written"};
  }

  ToolAnswer submit() {
    const int64_t left = world.at("left").get<int64_t>() - 1;
    world["left"] = left;
    const bool passed = passes();
    // Whether it passed and nothing else: the tests stay hidden.
    return {.text = passed ? "passed" : "failed, " + std::to_string(left) + " left",
            .checked = true,
            .valid = passed,
            .done = passed || left <= 0,
            .success = passed ? 1.0 : 0.0};
  }

  bool passes() const {
    const Job& job = jobs()[world.at("job").get<size_t>()];
    const Scratch folder;
    for (const auto& [name, text] : world.at("files").items())
      write_file(folder.path() + "/" + name, text.get<std::string>());
    const SandboxLimits limits{
        .cpu_s = 1, .memory_bytes = 64 << 20, .work_bytes = 1 << 20, .processes = 4, .line_bytes = 4096};
    for (const json& test : world.at("tests")) {
      const int64_t a = test[0], b = test[1];
      Sandbox sandbox(
          {"/usr/bin/sh", "/program/" + std::string(job.name) + ".sh", std::to_string(a), std::to_string(b)},
          folder.path(), limits, options_.weaker);
      std::string printed;
      if (sandbox.ask("", /*timeout_s=*/5, printed) != Sandbox::Answer::kLine) return false;
      if (printed != std::to_string(job.value(a, b))) return false;
    }
    return true;
  }

  Reply respond(const std::string&) override { return {.success = 0}; }

  Options options_;
};

}  // namespace

std::unique_ptr<Environment> make_files(const json& options) {
  check_options("files", options, {"submissions", "turns", "guess", "weaker"});
  Options o;
  o.submissions = options.value("submissions", o.submissions);
  o.turns = options.value("turns", o.turns);
  o.guess = options.value("guess", o.guess);
  o.weaker = options.value("weaker", o.weaker);
  return std::make_unique<Files>(o);
}

}  // namespace godwit::rl
