#include "godwit/rl/judge.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "tests/rl/tiny_policy.h"
#include "tests/support/files.h"

namespace godwit::rl {
namespace {

const char* const kPython = "/usr/bin/python3";

JudgeOptions options_of(std::vector<std::string> more = {}) {
  JudgeOptions o;
  o.command = {kPython, "-I", "/program/judge.py"};
  o.command.insert(o.command.end(), more.begin(), more.end());
  o.folder = std::string(GODWIT_SOURCE_DIR) + "/tests/rl/programs";
  o.answer_s = 10;
  return o;
}

Trajectory episode(const Tokenizer& tokenizer, const std::string& told, const std::string& wrote) {
  Trajectory t;
  t.ids = tokenizer.encode(told);
  const auto begin = static_cast<int64_t>(t.ids.size());
  for (const int32_t id : tokenizer.encode(wrote)) t.ids.push_back(id);
  const auto end = static_cast<int64_t>(t.ids.size());
  t.logp.assign(t.ids.size(), 0);
  t.segments = {{.begin = begin, .end = end, .version = 0}};
  t.turns = {{.begin = begin, .end = end}};
  t.done = true;
  return t;
}

class Judged : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(kPython)) GTEST_SKIP() << "no " << kPython;
    try {
      Sandbox probe({"/usr/bin/true"}, "", {}, /*weaker=*/false);
    } catch (const Error& error) {
      GTEST_SKIP() << error.what();
    }
  }
  Tokenizer tokenizer_ = test::byte_tokenizer();
};

TEST_F(Judged, ScoresWhatTheModelWroteAndNothingElse) {
  JudgeOptions o = options_of();
  o.longest = 6;
  Judge judge(o);
  const std::vector<Trajectory> group = {episode(tokenizer_, "eeee", "abcd"),
                                         episode(tokenizer_, "x", "eeab"),
                                         episode(tokenizer_, "x", "eeeeeeee")};
  EXPECT_EQ(judge.score(group, tokenizer_), (std::vector<double>{0, 0.5, 0})) << "the last is too long";
  EXPECT_EQ(judge.score({group[1]}, tokenizer_), (std::vector<double>{0.5}));
}

TEST_F(Judged, ABadJudgeStopsTheRun) {
  const std::vector<Trajectory> group = {episode(tokenizer_, "a", "b"), episode(tokenizer_, "a", "c")};
  const std::string kDeep = std::string(20000, '[') + std::string(20000, ']');
  for (const char* bad : {"[1]", "[1, 2]", "[0, \"x\"]", "7", kDeep.c_str()}) {
    Judge judge(options_of({bad}));
    testing::expect_error([&] { judge.score(group, tokenizer_); }, {"judge"});
  }
  Judge ended(options_of({"no json"}));
  testing::expect_error([&] { ended.score(group, tokenizer_); }, {"judge", "the program"});
}

}  // namespace
}  // namespace godwit::rl
