#include "godwit/rl/environment.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "godwit/rl/tool_environment.h"
#include "tests/support/files.h"

namespace godwit::rl {
namespace {

using nlohmann::json;

struct Played {
  double success = 0;
  int64_t turns = 0, calls = 0, faults = 0, redundant = 0, wrong = 0, checked = 0, valid = 0;
  std::string reason;
};

void add(Played& played, const StepResult& r) {
  ++played.turns;
  played.calls += r.calls;
  played.faults += r.faults;
  played.redundant += r.redundant;
  played.wrong += r.wrong;
  played.checked += r.checked;
  played.valid += r.valid;
  if (!r.done) return;
  played.success = r.success;
  played.reason = r.reason;
}

// The scripted expert's episode. With `reload`, every step is made by a fresh object that loaded the state.
Played play(const std::string& name, const json& options, uint64_t seed, bool reload = false) {
  auto environment = make_environment(name, options);
  environment->reset(seed);
  Played played;
  for (int i = 0; i < 300 && played.reason.empty(); ++i) {
    if (reload) {
      const std::string saved = environment->save();
      environment = make_environment(name, options);
      environment->load(saved);
      EXPECT_EQ(environment->save(), saved);
    }
    const auto turn = environment->demonstrate();
    add(played, environment->step(*turn));
  }
  return played;
}

class Builtin : public ::testing::TestWithParam<const char*> {};

TEST_P(Builtin, TheExpertSolvesItAndASavedStateGoesOnTheSame) {
  const uint64_t seeds = std::string(GetParam()) == "files" ? 3 : 20;  // its tests run programs
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    const Played a = play(GetParam(), json::object(), seed), b = play(GetParam(), json::object(), seed, true);
    EXPECT_EQ(a.success, 1) << seed;
    EXPECT_EQ(a.wrong, 0);
    EXPECT_EQ(a.redundant, 0);
    EXPECT_EQ(a.checked, a.valid);
    EXPECT_EQ(std::tuple(a.success, a.turns, a.calls, a.faults, a.reason),
              std::tuple(b.success, b.turns, b.calls, b.faults, b.reason));
  }
}

TEST_P(Builtin, TheTaskIsAFunctionOfTheSeed) {
  auto a = make_environment(GetParam(), json::object()), b = make_environment(GetParam(), json::object());
  a->reset(1);
  const Task first = a->reset(7), second = b->reset(7), other = b->reset(8);
  EXPECT_EQ(text_of(first.messages.at(0)), text_of(second.messages.at(0)));
  EXPECT_EQ(first.tools, second.tools);
  EXPECT_NE(text_of(first.messages.at(0)), text_of(other.messages.at(0)));
}

TEST_P(Builtin, NothingThatAModelWritesThrows) {
  const char* const kArguments[] = {"",
                                    "null",
                                    "[]",
                                    "{}",
                                    "{\"a\":1}",
                                    "{\"a\":\"x\",\"op\":7,\"b\":[]}",
                                    "{\"direction\":5}",
                                    "{\"key\":{}}",
                                    "{\"a\":1e300,\"op\":\"*\",\"b\":1e300}"};
  const char* const kTools[] = {"calc", "write_note", "read_note", "move", "", "rm -rf"};
  for (const char* tool : kTools) {
    for (const char* arguments : kArguments) {
      auto environment = make_environment(GetParam(), json::object());
      environment->reset(3);
      ChatMessage turn;
      turn.role = ChatRole::kAssistant;
      turn.tool_calls.push_back({.id = "call_0", .name = tool, .arguments = arguments});
      const StepResult r = environment->step(turn);
      EXPECT_EQ(r.calls, 1);
      ASSERT_EQ(r.messages.size(), 1u);
      EXPECT_EQ(r.messages[0].tool_call_id, "call_0");
    }
  }
}

TEST_P(Builtin, TurnsAreLimited) {
  auto environment = make_environment(GetParam(), {{"turns", 2}});
  environment->reset(0);
  const ChatMessage turn = assistant_calls("nothing", json::object());
  EXPECT_FALSE(environment->step(turn).done);
  const StepResult last = environment->step(turn);
  EXPECT_TRUE(last.done);
  EXPECT_EQ(last.reason, "turns");
  EXPECT_EQ(last.success, 0);
  godwit::testing::expect_error([&] { environment->step(turn); }, {"end of the episode"});
}

INSTANTIATE_TEST_SUITE_P(All, Builtin,
                         ::testing::Values("calculator", "notes", "grid", "sql", "log_search", "files"),
                         [](const auto& info) { return std::string(info.param); });

TEST(Environment, UnknownNamesAndOptions) {
  godwit::testing::expect_error([] { make_environment("chess", json::object()); }, {"chess", "calculator"});
  godwit::testing::expect_error([] { make_environment("grid", {{"depth", 3}}); }, {"grid", "depth", "width"});
  godwit::testing::expect_error([] { make_environment("grid", {{"width", "wide"}}); }, {"grid", "type"});
}

TEST(Calculator, FailuresComeAtTheirRateAndGivingUpFails) {
  int64_t faults = 0, calls = 0, solved = 0, recovered = 0, with_faults = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const Played p = play("calculator", {{"give_up", 1.0}}, seed);
    faults += p.faults;
    calls += p.calls;
    with_faults += p.faults > 0;
    (p.faults > 0 ? recovered : solved) += p.success > 0;
  }
  // 0.25 of several hundred draws: three standard deviations are 0.07.
  EXPECT_NEAR(static_cast<double>(faults) / static_cast<double>(calls), 0.25, 0.07);
  EXPECT_EQ(solved + with_faults, 200);
  EXPECT_LE(recovered, 5);  // by luck: what is left of the chain is "* 1"
}

TEST(Calculator, RepeatedCallsAreRedundantAndStepsAreJudged) {
  auto environment = make_environment("calculator", {{"failure", 0.0}, {"steps", 1}});
  environment->reset(4);
  const auto right = environment->demonstrate();
  const ChatMessage other = assistant_calls("calc", {{"a", 999}, {"op", "+"}, {"b", 1}});
  StepResult r = environment->step(other);
  EXPECT_EQ(text_of(r.messages.at(0)), "1000");
  EXPECT_EQ(std::pair(r.checked, r.valid), std::pair(int64_t{1}, int64_t{0}));
  EXPECT_EQ(environment->step(other).redundant, 1);
  r = environment->step(*right);
  EXPECT_EQ(std::pair(r.checked, r.valid), std::pair(int64_t{1}, int64_t{1}));
  EXPECT_EQ(r.redundant, 0);
  r = environment->step(assistant_says("The result is " + text_of(r.messages.at(0)) + "."));
  EXPECT_TRUE(r.done);
  EXPECT_EQ(r.success, 1);
}

TEST(Grid, EqualPlacesAreEqualStates) {
  auto environment = make_environment("grid", {{"width", 9}, {"height", 9}, {"turns", 99}});
  for (uint64_t seed = 0; seed < 10; ++seed) {
    environment->reset(seed);
    // A step and back, where both are free and no key is picked up.
    const uint64_t start = environment->state_hash();
    const auto move = [&](const char* d) {
      return text_of(environment->step(assistant_calls("move", {{"direction", d}})).messages.at(0));
    };
    const std::string before = move("nowhere");
    const std::string there = move("left");
    if (there.starts_with("a wall")) continue;
    EXPECT_NE(environment->state_hash(), start);
    move("right");
    if (there.ends_with("key: no")) {
      EXPECT_EQ(environment->state_hash(), start);
    }
  }
}

TEST(Notes, RecallNeedsTheRightCode) {
  auto environment = make_environment("notes", {{"facts", 1}, {"gap", 0}});
  environment->reset(1);
  EXPECT_FALSE(environment->step(assistant_says("ok")).done);
  const StepResult r = environment->step(assistant_says("99"));
  EXPECT_TRUE(r.done);
  EXPECT_EQ(r.success, 0);
}

TEST(Sql, OnlyReading) {
  const auto ask = [](const std::string& sql) {
    auto environment = make_environment("sql", json::object());
    environment->reset(2);
    return environment->step(assistant_calls("query", {{"sql", sql}}));
  };
  EXPECT_EQ(text_of(ask("SELECT COUNT(*) FROM people").messages.at(0)), "8\n");
  for (const char* bad :
       {"DROP TABLE people", "DELETE FROM people", "UPDATE people SET age = 1", "ATTACH 'x' AS y",
        "PRAGMA writable_schema = 1", "SELECT load_extension('x')", "nonsense", "VACUUM INTO '/tmp/x'"}) {
    const StepResult r = ask(bad);
    EXPECT_EQ(r.wrong, 1) << bad;
    EXPECT_TRUE(text_of(r.messages.at(0)).starts_with("error")) << bad;
  }
  // Work without end is cut off, an empty query is no rows.
  EXPECT_EQ(ask("WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT SUM(x) FROM r").wrong,
            1);
  EXPECT_EQ(ask("").wrong, 0);
}

TEST(LogSearch, ALongObservationIsGivenWhole) {
  const json options = {{"lines", 20000}, {"search", false}};
  auto environment = make_environment("log_search", options);
  environment->reset(5);
  const StepResult r = environment->step(*environment->demonstrate());
  EXPECT_GT(text_of(r.messages.at(0)).size(), 300000u);
  EXPECT_LT(environment->save().size(), 1000u);  // and is not part of the state
  EXPECT_EQ(environment->step(*environment->demonstrate()).success, 1);
}

TEST(Files, TestsStayHiddenAndSubmissionsEnd) {
  auto environment = make_environment("files", {{"submissions", 2}});
  environment->reset(1);
  const ChatMessage submit = assistant_calls("submit", json::object());
  StepResult r = environment->step(submit);
  EXPECT_EQ(text_of(r.messages.at(0)), "failed, 1 left");
  EXPECT_FALSE(r.done);
  const auto write = [&](const std::string& path, const std::string& text) {
    return environment->step(assistant_calls("write_file", {{"path", path}, {"text", text}}));
  };
  for (const char* path : {"/etc/passwd", "../x", "new.sh", ""}) EXPECT_EQ(write(path, "x").wrong, 1) << path;
  r = environment->step(submit);
  EXPECT_TRUE(r.done);
  EXPECT_EQ(r.success, 0);
  // A script that never ends fails its test.
  environment->reset(2);
  const std::string path = json::parse(environment->save())["world"]["files"].begin().key();
  EXPECT_EQ(write(path, "while true; do :; done\n").wrong, 0);
  EXPECT_EQ(text_of(environment->step(submit).messages.at(0)), "failed, 1 left");
}

TEST(ReadInteger, OneNumberAndNoMore) {
  int64_t v = 0;
  EXPECT_TRUE(read_integer("it is -42.", v));
  EXPECT_EQ(v, -42);
  EXPECT_TRUE(read_integer("7", v));
  EXPECT_EQ(v, 7);
  for (const char* bad : {"", "none", "1 or 2", "1.5", "99999999999999999999"})
    EXPECT_FALSE(read_integer(bad, v)) << bad;
}

}  // namespace
}  // namespace godwit::rl
