#include <algorithm>

#include "godwit/base/check.h"
#include "godwit/base/rng.h"
#include "godwit/rl/environments.h"
#include "godwit/rl/tool_environment.h"

namespace godwit::rl {
namespace {

using nlohmann::json;

constexpr uint64_t kLogStream = 0x6c6f67;  // "log"

struct Options {
  int64_t lines = 200, failures = 4, turns = 12;
  bool search = true;
};

// World: seed of the log, places (lines that report a failure, ascending), jobs and codes of these, asked:
// which. The log itself is a function of these and never stored: it may have millions of tokens.
class LogSearch final : public ToolEnvironment {
 public:
  explicit LogSearch(const Options& options) : ToolEnvironment({.turns = options.turns}), options_(options) {}

  std::unique_ptr<ChatMessage> demonstrate() override {
    const auto asked = world.at("asked").get<size_t>();
    if (world.at("seen"))
      return std::make_unique<ChatMessage>(
          assistant_says(std::to_string(world.at("codes")[asked].get<int64_t>())));
    if (!options_.search) return std::make_unique<ChatMessage>(assistant_calls("read_log", json::object()));
    return std::make_unique<ChatMessage>(assistant_calls(
        "find", {{"text", "job " + std::to_string(world.at("jobs")[asked].get<int64_t>()) + " failed"}}));
  }

 private:
  Task begin(Draws& draws) override {
    world = {{"seed", draws.bits()}, {"seen", false}};
    std::vector<int64_t> places, jobs, codes;
    while (static_cast<int64_t>(places.size()) < options_.failures) {
      const int64_t place = draws.below(options_.lines), job = draws.between(1000, 9999);
      if (std::find(places.begin(), places.end(), place) != places.end() ||
          std::find(jobs.begin(), jobs.end(), job) != jobs.end()) {
        continue;
      }
      places.push_back(place);
      jobs.push_back(job);
      codes.push_back(draws.between(100, 999));
    }
    world["places"] = places;
    world["jobs"] = jobs;
    world["codes"] = codes;
    const int64_t asked = draws.below(options_.failures);
    world["asked"] = asked;
    json tools = json::array();
    if (options_.search) {
      tools.push_back(tool_declaration("read_log", "lines first to last of the log",
                                       {{"first", "integer"}, {"last", "integer"}}));
      tools.push_back(tool_declaration("find", "lines that hold a text", {{"text", "string"}}));
    } else {
      tools.push_back(tool_declaration("read_log", "the whole log", json::object()));
    }
    return {
        .messages = {user_says("The log has " + std::to_string(options_.lines) +
                               " lines. With what code did job " + std::to_string(jobs[asked]) + " fail?")},
        .tools = tools.dump(),
        .base_tokens = 0};
  }

  std::string line(int64_t i) const {
    const auto places = world.at("places").get<std::vector<int64_t>>();
    const auto found = std::find(places.begin(), places.end(), i);
    const std::string number = std::to_string(i);
    if (found != places.end()) {
      const auto k = static_cast<size_t>(found - places.begin());
      return number + " job " + std::to_string(world.at("jobs")[k].get<int64_t>()) + " failed with code " +
             std::to_string(world.at("codes")[k].get<int64_t>());
    }
    const uint64_t bits = random_bits(world.at("seed").get<uint64_t>(), kLogStream, static_cast<uint64_t>(i));
    const char* const kEvents[] = {"job", "disk", "cache", "user"};
    const char* const kWords[] = {"done", "ready", "waits", "opened"};
    return number + " " + kEvents[bits % 4] + " " + std::to_string(1000 + bits / 16 % 9000) + " " +
           kWords[bits / 4 % 4];
  }

  ToolAnswer call(const std::string& tool, const json& arguments, Draws&) override {
    const auto places = world.at("places").get<std::vector<int64_t>>();
    const int64_t place = places[world.at("asked").get<size_t>()];
    std::string text;
    bool seen = false;
    if (tool == "read_log") {
      const int64_t first = std::max<int64_t>(0, arguments.value("first", int64_t{0}));
      const int64_t last = std::min(options_.lines - 1, arguments.value("last", options_.lines - 1));
      for (int64_t i = first; i <= last; ++i) text += line(i) + "\n";
      seen = place >= first && place <= last;
    } else if (tool == "find" && options_.search) {
      const auto wanted = arguments.at("text").get<std::string>();
      constexpr int kMostFound = 20;
      int found = 0;
      for (int64_t i = 0; i < options_.lines && found < kMostFound; ++i) {
        const std::string candidate = line(i);
        if (wanted.empty() || candidate.find(wanted) == std::string::npos) continue;
        text += candidate + "\n";
        ++found;
        seen = seen || i == place;
      }
    } else {
      return {.text = "error: there is no tool " + tool, .wrong = true};
    }
    if (seen) world["seen"] = true;
    return {.text = text.empty() ? "nothing" : text, .checked = true, .valid = seen};
  }

  Reply respond(const std::string& text) override {
    int64_t value = 0;
    return {.success =
                read_integer(text, value) && value == world.at("codes")[world.at("asked").get<size_t>()]
                    ? 1.0
                    : 0.0};
  }

  Options options_;
};

}  // namespace

std::unique_ptr<Environment> make_log_search(const json& options) {
  check_options("log_search", options, {"lines", "failures", "turns", "search"});
  Options o;
  o.lines = options.value("lines", o.lines);
  o.failures = options.value("failures", o.failures);
  o.turns = options.value("turns", o.turns);
  o.search = options.value("search", o.search);
  check(o.failures >= 1 && o.failures <= 1000 && o.lines >= 2 * o.failures,
        "environment log_search: {} failures in {} lines; expected at least 1, and twice as many lines",
        o.failures, o.lines);
  return std::make_unique<LogSearch>(o);
}

}  // namespace godwit::rl
