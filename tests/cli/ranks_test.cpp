// `godwit train` as several processes.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>

#include "tests/cli/program.h"
#include "tests/cli/tiny_recipe.h"
#include "tests/support/ranks.h"

namespace godwit {
namespace {

namespace fs = std::filesystem;
using test::Outcome;
using test::Process;

using Job = std::vector<std::unique_ptr<Process>>;

Job start(int size, const fs::path& out, const std::vector<std::string>& set, bool resume = false) {
  const int port = test::free_port();
  Job job;
  for (int rank = 0; rank < size; ++rank)
    job.push_back(std::make_unique<Process>(test::train_arguments(out, set, resume), "",
                                            test::rank_variables(rank, size, port)));
  return job;
}

void expect_success(Job job) {
  for (size_t rank = 0; rank < job.size(); ++rank) {
    const Outcome o = job[rank]->wait();
    EXPECT_EQ(o.code, 0) << "rank " << rank << ": " << o.err;
    EXPECT_EQ(o.out.empty(), rank != 0);  // one summary
    if (rank != 0) EXPECT_EQ(o.err.find("resuming"), std::string::npos) << o.err;
  }
}

std::vector<nlohmann::json> rows(const fs::path& out) {
  std::vector<nlohmann::json> rows;
  std::ifstream file(out / "metrics.jsonl");
  for (std::string line; std::getline(file, line);) {
    auto row = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (row.is_object()) rows.push_back(std::move(row));  // the last line may be under way
  }
  return rows;
}

// The gradients' sums run in another order and Newton-Schulz amplifies that, so the losses are alike, not
// equal.
void expect_alike(const fs::path& run, const fs::path& expected) {
  const auto a = rows(run), b = rows(expected);
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    for (const char* key : {"step", "stage", "tokens", "lr"})
      EXPECT_EQ(a[i].at(key), b[i].at(key)) << i << key;
    EXPECT_NEAR(a[i].at("loss").get<double>(), b[i].at("loss").get<double>(), 5e-3) << i;
  }
}

const std::vector<std::string> kRecipe = {"stage.0.steps=5",         "stage.1.steps=2",
                                          "checkpoint.every=3",      "checkpoint.keep=0",
                                          "train.tensorboard=false", "eval.tokens=512"};

TEST(Ranks, TwoTrainAsOneAndResumeAsTwoOneOrFour) {
  const testing::ScratchDir scratch;
  const fs::path one = scratch / "one", two = scratch / "two";
  ASSERT_EQ(test::run(test::train_arguments(one, kRecipe)).code, 0);
  expect_success(start(2, two, kRecipe));
  expect_alike(two, one);
  EXPECT_NEAR(rows(two)[0].at("loss").get<double>(), rows(one)[0].at("loss").get<double>(), 1e-5);
  // What two ranks saved at step 3, gone on with by two, one and four. (In the last stage a step has two
  // sequences.)
  for (const int size : {2, 1, 4}) {
    const fs::path out = scratch / ("resumed" + std::to_string(size));
    fs::copy(two, out, fs::copy_options::recursive);
    for (const auto& entry : fs::directory_iterator(out / "checkpoints"))
      if (entry.path().filename() != "step-3") fs::remove_all(entry.path());
    expect_success(start(size, out, kRecipe, /*resume=*/true));
    expect_alike(out, one);
    if (size != 2) continue;
    const char* state = "checkpoints/step-7/state.safetensors";
    EXPECT_TRUE(read_file(out / state) == read_file(two / state)) << "not bit for bit";
  }
}

// Waits until the run has made a step, then does `fault` to rank `guilty`: every other rank ends with 1 and
// names it.
void expect_named(int guilty, int signal, const std::string& part) {
  const testing::ScratchDir scratch;
  const fs::path out = scratch / "run";
  std::vector<std::string> set = kRecipe;
  set.insert(set.end(), {"dist.timeout_s=4.0", "stage.0.steps=100000"});
  Job job = start(3, out, set);
  while (rows(out).size() < 1) {
    for (const auto& process : job) ASSERT_TRUE(process->running()) << process->wait().err;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  job[guilty]->send(signal);
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  for (int rank = 0; rank < 3; ++rank) {
    if (rank == guilty) continue;
    const auto o = job[rank]->wait_for(30);
    ASSERT_TRUE(o.has_value()) << "rank " << rank << " still runs";
    EXPECT_EQ(o->code, 1) << o->err;
    const std::string name = "rank " + std::to_string(guilty) + " (host " + host + ")" + part;
    EXPECT_EQ(o->err.find("frame #"), std::string::npos) << o->err;  // a line, not a stack trace
    EXPECT_NE(o->err.find(name), std::string::npos)
        << "rank " << rank << " does not name " << name << ": " << o->err;
  }
}

TEST(Ranks, ARankThatIsKilledIsNamed) {
  expect_named(1, SIGKILL, " is gone");
}

TEST(Ranks, ARankThatIsStoppedIsNamed) {
  expect_named(1, SIGSTOP, " is gone: no sign of life");
}

TEST(Ranks, RankZeroIsNamedToo) {
  expect_named(0, SIGKILL, " is gone");
}

TEST(Ranks, AnErrorOfOneEndsAll) {
  const testing::ScratchDir scratch;
  const fs::path out = scratch / "run";
  fs::create_directories(out / "checkpoints");
  Job job = start(2, out, kRecipe);
  const Outcome zero = job[0]->wait(), one = job[1]->wait();
  EXPECT_EQ(zero.code, 1);
  EXPECT_EQ(one.code, 1);
  EXPECT_NE(zero.err.find("holds a run already"), std::string::npos) << zero.err;
  EXPECT_NE(one.err.find("rank 0 (host "), std::string::npos) << one.err;
  EXPECT_NE(one.err.find("holds a run already"), std::string::npos) << one.err;
}

TEST(Ranks, AnotherRecipeOnOneEndsAll) {
  for (const char* other : {"optimizer.muon_lr=0.1", "seed=9", "stage.0.batch_tokens=2048"}) {
    const testing::ScratchDir scratch;
    const int port = test::free_port();
    Job job;
    for (int rank = 0; rank < 2; ++rank) {
      std::vector<std::string> set = kRecipe;
      if (rank == 1) set.emplace_back(other);
      job.push_back(std::make_unique<Process>(test::train_arguments(scratch / "run", set), "",
                                              test::rank_variables(rank, 2, port)));
    }
    const std::string key(other, std::strchr(other, '='));
    for (auto& process : job) {
      const auto o = process->wait_for(60);
      ASSERT_TRUE(o.has_value()) << other;
      EXPECT_EQ(o->code, 1) << o->err;
      EXPECT_NE(o->err.find("rank 1 has another recipe than rank 0: " + key), std::string::npos) << o->err;
    }
  }
}

TEST(Ranks, SigtermToOneSavesAndEndsAllWithZero) {
  const testing::ScratchDir scratch;
  const fs::path out = scratch / "run";
  std::vector<std::string> set = kRecipe;
  set.push_back("stage.0.steps=100000");
  Job job = start(2, out, set);
  while (rows(out).size() < 1) {
    ASSERT_TRUE(job[0]->running());
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  job[1]->send(SIGTERM);
  expect_success(std::move(job));
  EXPECT_TRUE(fs::exists(out / "checkpoints" / ("step-" + std::to_string(rows(out).size()))));
}

}  // namespace
}  // namespace godwit
