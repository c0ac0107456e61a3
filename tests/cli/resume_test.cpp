// A run that is killed, stopped or starved of disk, and resumed, ends as the run that was left alone.
//
// The long form, 20 kills:  GODWIT_KILLS=20 build/cli_tests --gtest_filter='Resume.*'
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>

#include "tests/cli/program.h"
#include "tests/cli/tiny_recipe.h"

namespace godwit {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using test::Outcome;
using test::Process;
using test::train_arguments;

// Two stages with a gate, an evaluation inside a stage, a checkpoint every other step.
std::vector<std::string> recipe(int steps) {
  return {"stage.0.steps=" + std::to_string(steps),
          "stage.1.steps=2",
          "stage.0.batch_tokens=512",
          "stage.1.gate=9.0",
          "eval.every=3",
          "eval.tokens=512",
          "checkpoint.every=2",
          "train.tensorboard=false"};
}

std::vector<nlohmann::json> rows(const fs::path& out) {
  std::vector<nlohmann::json> rows;
  std::ifstream file(out / "metrics.jsonl");
  for (std::string line; std::getline(file, line);) {
    rows.push_back(nlohmann::json::parse(line));
    for (const char* clock : {"tokens_per_s", "seconds"}) rows.back().erase(clock);
  }
  return rows;
}

std::string newest_checkpoint(const fs::path& out) {
  int64_t newest = -1;
  for (const auto& entry : fs::directory_iterator(out / "checkpoints")) {
    const std::string name = entry.path().filename().string();
    if (!name.ends_with(".tmp")) newest = std::max<int64_t>(newest, std::stoll(name.substr(5)));
  }
  return "step-" + std::to_string(newest);
}

// Weights, momenta, moments, step counts, biases, load windows; where the run stands; the model; the metrics.
void expect_same_run(const fs::path& run, const fs::path& expected) {
  const std::string step = newest_checkpoint(expected);
  ASSERT_EQ(newest_checkpoint(run), step);
  const fs::path a = run / "checkpoints" / step, b = expected / "checkpoints" / step;
  EXPECT_TRUE(read_file(a / "state.safetensors") == read_file(b / "state.safetensors"))
      << "the states differ";
  auto here = nlohmann::json::parse(read_file(a / "checkpoint.json"));
  auto there = nlohmann::json::parse(read_file(b / "checkpoint.json"));
  for (nlohmann::json* where : {&here, &there}) {
    where->erase("recipe");  // it names `out`
    where->at("position").erase("elapsed_s");
  }
  EXPECT_EQ(here, there);
  EXPECT_TRUE(read_file(run / "model/model.safetensors") == read_file(expected / "model/model.safetensors"));
  EXPECT_EQ(rows(run), rows(expected));
  for (const auto& entry : fs::recursive_directory_iterator(run))
    EXPECT_EQ(entry.path().filename().string().find(".tmp"), std::string::npos) << entry.path();
}

bool writes_a_checkpoint(const fs::path& out) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(out / "checkpoints", error))
    if (entry.path().extension() == ".tmp") return true;
  return false;
}

struct Kill {
  bool in_checkpoint = false;
  double after_s = 0;  // of the start, or of the moment a checkpoint was seen to be under way
};

// False: the run ended before.
bool killed(Process& process, const fs::path& out, const Kill& kill) {
  if (kill.in_checkpoint) {
    while (!writes_a_checkpoint(out))
      if (!process.running()) return false;
  }
  const auto end = Clock::now() + std::chrono::duration<double>(kill.after_s);
  while (Clock::now() < end)
    if (!process.running()) return false;
  process.send(SIGKILL);
  return process.wait().code == 128 + SIGKILL;
}

TEST(Resume, KilledAtRandomMomentsEndsBitEqual) {
  const char* wanted = std::getenv("GODWIT_KILLS");
  const int kills = wanted != nullptr ? std::atoi(wanted) : 3;
  const std::vector<std::string> set = recipe(/*steps=*/kills > 3 ? 30 : 8);
  const testing::ScratchDir scratch;
  const fs::path whole = scratch / "whole", parts = scratch / "parts";
  const auto begin = Clock::now();
  const Outcome undisturbed = test::run(train_arguments(whole, set));
  ASSERT_EQ(undisturbed.code, 0) << undisturbed.err;
  const double run_s = std::chrono::duration<double>(Clock::now() - begin).count();
  std::mt19937_64 random(std::random_device{}());
  int done = 0, in_checkpoint = 0;
  for (int start = 0; done < kills; ++start) {
    ASSERT_LT(start, 20 * kills) << "the run ends before it can be killed";
    // Every other kill waits for a checkpoint under way; its writing takes a few milliseconds.
    const bool aimed = done % 2 == 1;
    const double after = std::uniform_real_distribution<double>(0, aimed ? 0.01 : 0.7 * run_s)(random);
    Process process(train_arguments(parts, set, /*resume=*/fs::exists(parts)));
    if (killed(process, parts, {.in_checkpoint = aimed, .after_s = after})) {
      ++done;
      in_checkpoint += writes_a_checkpoint(parts);
    } else {
      const Outcome o = process.wait();
      ASSERT_EQ(o.code, 0) << o.err;
      expect_same_run(parts, whole);  // it came through; the next one starts anew
      fs::remove_all(parts);
    }
  }
  const Outcome last = test::run(train_arguments(parts, set, /*resume=*/true));
  ASSERT_EQ(last.code, 0) << last.err;
  expect_same_run(parts, whole);
  std::printf("%d kills survived, %d of them left a half-written checkpoint\n", done, in_checkpoint);
}

TEST(Resume, SigtermSavesAndExitsWithZero) {
  const testing::ScratchDir scratch;
  const fs::path whole = scratch / "whole", parts = scratch / "parts";
  const std::vector<std::string> set = recipe(/*steps=*/8);
  ASSERT_EQ(test::run(train_arguments(whole, set)).code, 0);
  {
    Process process(train_arguments(parts, set));
    while (!fs::exists(parts / "metrics.jsonl") || fs::file_size(parts / "metrics.jsonl") == 0) {
      ASSERT_TRUE(process.running());
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    process.send(SIGTERM);
    const Outcome o = process.wait();
    EXPECT_EQ(o.code, 0) << o.err;
    EXPECT_NE(o.out.find("--resume goes on"), std::string::npos) << o.out;
    EXPECT_EQ(newest_checkpoint(parts), "step-" + std::to_string(rows(parts).size()));
    EXPECT_LT(rows(parts).size(), rows(whole).size());
  }
  ASSERT_EQ(test::run(train_arguments(parts, set, /*resume=*/true)).code, 0);
  expect_same_run(parts, whole);
}

// Files are limited to `bytes` in the process that is started.
Outcome run_with_small_files(const std::vector<std::string>& args, rlim_t bytes) {
  rlimit old = {};
  ::getrlimit(RLIMIT_FSIZE, &old);
  const rlimit small = {.rlim_cur = bytes, .rlim_max = old.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);
  Process process(args);
  ::setrlimit(RLIMIT_FSIZE, &old);
  return process.wait();
}

TEST(Resume, AFailedWriteLeavesTheGoodCheckpoint) {
  const testing::ScratchDir scratch;
  const fs::path whole = scratch / "whole", parts = scratch / "parts";
  const std::vector<std::string> set = recipe(/*steps=*/4);
  ASSERT_EQ(test::run(train_arguments(whole, set)).code, 0);
  std::vector<std::string> half = set;
  half.push_back("train.time_limit_s=1e-9");  // stops after its first step
  ASSERT_EQ(test::run(train_arguments(parts, half)).code, 0);
  const std::string good = read_file(parts / "checkpoints/step-1/state.safetensors");
  const Outcome o = run_with_small_files(train_arguments(parts, set, /*resume=*/true), good.size() / 2);
  EXPECT_EQ(o.code, 1) << o.err;
  EXPECT_NE(o.err.find("state.safetensors: File too large"), std::string::npos) << o.err;
  EXPECT_EQ(newest_checkpoint(parts), "step-1");
  EXPECT_TRUE(read_file(parts / "checkpoints/step-1/state.safetensors") == good);
  ASSERT_EQ(test::run(train_arguments(parts, set, /*resume=*/true)).code, 0);
  expect_same_run(parts, whole);
}

TEST(Resume, AFullDiskLeavesTheGoodCheckpoint) {
  const testing::ScratchDir scratch;
  const fs::path whole = scratch / "whole";
  const std::vector<std::string> set = recipe(/*steps=*/4);
  ASSERT_EQ(test::run(train_arguments(whole, set)).code, 0);
  const auto bytes = static_cast<int>(fs::file_size(whole / "checkpoints/step-6/state.safetensors"));
  const testing::SmallDisk disk(bytes * 3 / 2 / 1024);  // one checkpoint fits, two do not
  if (!disk.mounted()) GTEST_SKIP() << "mounting a small file system needs root";
  const fs::path parts = disk.path() / "run";
  const Outcome o = test::run(train_arguments(parts, set));
  EXPECT_EQ(o.code, 1) << o.err;
  EXPECT_NE(o.err.find("No space left"), std::string::npos) << o.err;
  EXPECT_EQ(newest_checkpoint(parts), "step-2");
  fs::copy(parts, scratch / "parts", fs::copy_options::recursive);  // to a disk with room
  ASSERT_EQ(test::run(train_arguments(scratch / "parts", set, /*resume=*/true)).code, 0);
  expect_same_run(scratch / "parts", whole);
}

TEST(Resume, AChangedRecipeIsNamedAndRefusedWhereItCannotBeHonoured) {
  const testing::ScratchDir scratch;
  const fs::path out = scratch / "run";
  std::vector<std::string> set = recipe(/*steps=*/4);
  set.push_back("train.time_limit_s=1e-9");
  ASSERT_EQ(test::run(train_arguments(out, set)).code, 0);
  const std::string recipe_before = read_file(out / "recipe.toml");
  const auto changed = [&](const std::vector<std::string>& changes) {
    std::vector<std::string> other = set;
    other.insert(other.end(), changes.begin(), changes.end());
    return test::run(train_arguments(out, other, /*resume=*/true));
  };
  const Outcome refused = changed(
      {"optimizer.muon_lr=0.5", "stage.1.context=256", "model.override.num_experts=32", "eval.every=1"});
  EXPECT_EQ(refused.code, 1);
  for (const char* part :
       {"optimizer.muon_lr: 0.01 -> 0.5", "stage.1.context: 512 -> 256", "model.override: ", "init = \""})
    EXPECT_NE(refused.err.find(part), std::string::npos) << part << " is not in: " << refused.err;
  EXPECT_EQ(refused.err.find("eval.every"), std::string::npos) << refused.err;  // that one could be honoured
  EXPECT_EQ(read_file(out / "recipe.toml"), recipe_before);
  const Outcome honoured = changed({"eval.every=1", "stage.1.gate=5.0"});
  EXPECT_EQ(honoured.code, 0) << honoured.err;
  for (const char* part : {"stage.1.gate: 9.0 -> 5.0", "eval.every: 3 -> 1"})
    EXPECT_NE(honoured.err.find(part), std::string::npos) << part << " is not in: " << honoured.err;
}

// Two trainers would write one metrics file.
TEST(Resume, NotWhileTheRunGoesOn) {
  const testing::ScratchDir scratch;
  const fs::path out = scratch / "run";
  Process first(train_arguments(out, recipe(/*steps=*/100000)));
  while (!fs::exists(out / "metrics.jsonl") || fs::file_size(out / "metrics.jsonl") == 0) {
    ASSERT_TRUE(first.running()) << first.wait().err;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  const Outcome second = test::run(train_arguments(out, recipe(/*steps=*/100000), /*resume=*/true));
  EXPECT_EQ(second.code, 1);
  EXPECT_NE(second.err.find("another process is at work in this directory"), std::string::npos) << second.err;
  EXPECT_TRUE(first.running());
  first.send(SIGTERM);
  EXPECT_EQ(first.wait().code, 0);
}

// A gate that has not been passed stays in the way.
TEST(Resume, AFailedGateFailsAgain) {
  const testing::ScratchDir scratch;
  const fs::path out = scratch / "run";
  std::vector<std::string> set = recipe(/*steps=*/3);
  set.push_back("stage.1.gate=-50.0");
  const Outcome first = test::run(train_arguments(out, set));
  EXPECT_EQ(first.code, 1);
  const Outcome again = test::run(train_arguments(out, set, /*resume=*/true));
  EXPECT_EQ(again.code, 1);
  EXPECT_NE(again.err.find("more than the gate allows"), std::string::npos) << again.err;
  set.back() = "stage.1.gate=50.0";
  EXPECT_EQ(test::run(train_arguments(out, set, /*resume=*/true)).code, 0);
}

}  // namespace
}  // namespace godwit
