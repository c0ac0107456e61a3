// `godwit rl` as a user runs it, killed in the middle and resumed.
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>

#include "godwit/model/checkpoint.h"
#include "tests/cli/program.h"
#include "tests/rl/tiny_policy.h"

namespace godwit {
namespace {

using nlohmann::json;
using test::Outcome;

class Rl : public ::testing::Test {
 protected:
  void SetUp() override {
    LoadedModel model = test::tiny_policy(3);
    std::filesystem::create_directories(dir_ / "init");
    save_weights(model.config, model.weights, dir_ / "init");
    model.tokenizer.save(dir_ / "init");
    // A random model solves nothing: what tells its episodes apart is how long they are.
    testing::put_file(dir_ / "rl.toml", R"(
steps = 6
[[environment]]
name = "calculator"
[rollout]
groups = 4
samples = 4
finish_share = 0.5
turn_tokens = 24
context = 768
[reward]
success = 1
overlong_limit = 40
overlong_buffer = 40
[eval]
tasks = 8
[checkpoint]
every = 1
[train]
tensorboard = false
)");
  }

  std::vector<std::string> arguments(const std::string& out, bool resume) {
    std::vector<std::string> args = {"rl",    dir_ / "rl.toml",
                                     "--set", "out=" + (dir_ / out).string(),
                                     "--set", "init=" + (dir_ / "init").string()};
    if (resume) args.emplace_back("--resume");
    return args;
  }

  std::vector<std::string> rows(const std::string& out) {
    std::ifstream file(dir_ / out / "metrics.jsonl");
    std::vector<std::string> all;
    for (std::string line; std::getline(file, line) && line.ends_with("}");) {
      json row = json::parse(line);
      row.erase("rollout_s");
      row.erase("train_s");
      all.push_back(row.dump());
    }
    return all;
  }

  testing::ScratchDir dir_;
};

TEST_F(Rl, KilledAndResumedItIsTheSameRun) {
  const Outcome whole = test::run(arguments("whole", false));
  ASSERT_EQ(whole.code, 0) << whole.err;
  EXPECT_NE(whole.out.find("largest |dlogp| between rollout and trainer 0"), std::string::npos) << whole.out;
  {
    test::Process process(arguments("killed", false));
    for (int i = 0; i < 6000 && rows("killed").size() < 2 && process.running(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    process.send(SIGKILL);
    EXPECT_EQ(process.wait().code, 128 + SIGKILL);
  }
  const Outcome resumed = test::run(arguments("killed", true));
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_EQ(rows("whole"), rows("killed"));
  EXPECT_EQ(rows("whole").size(), 6u);
  EXPECT_EQ(read_file(dir_ / "whole/model/model.safetensors"),
            read_file(dir_ / "killed/model/model.safetensors"));
}

TEST_F(Rl, AModelIsMeasuredWithoutLearning) {
  const std::vector<std::string> args = {
      "eval",          "tools",      "--json",    "--model",   dir_ / "init",
      "--environment", "calculator", "--samples", "6",         "--context",
      "768",           "--seed",     "5",         "--options", R"({"failure": 0.5})"};
  const Outcome once = test::run(args), again = test::run(args);
  ASSERT_EQ(once.code, 0) << once.err;
  EXPECT_EQ(once.out, again.out);
  const json r = once.json();
  EXPECT_EQ(r.at("tasks"), 6);
  EXPECT_EQ(r.at("success").at("of"), 6);
  EXPECT_GE(r.at("success").at("high").get<double>(), r.at("success").at("share").get<double>());
  EXPECT_GT(r.at("tokens").get<double>(), 0);
  const Outcome bad = test::run({"eval", "tools", "--model", dir_ / "init"});
  EXPECT_EQ(bad.code, 1);
  EXPECT_NE(bad.err.find("--environment"), std::string::npos) << bad.err;
}

TEST_F(Rl, FailureIsOneLine) {
  std::vector<std::string> args = arguments("x", false);
  args.insert(args.end(), {"--set", "environment.0.name=chess"});
  const Outcome o = test::run(args);
  EXPECT_EQ(o.code, 1);
  EXPECT_EQ(o.err_lines(), 1) << o.err;
  EXPECT_NE(o.err.find("chess"), std::string::npos) << o.err;
}

}  // namespace
}  // namespace godwit
