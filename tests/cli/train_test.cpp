// `godwit train` as a user runs it, on the tiny recipe that ships with the tests.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/cli/program.h"
#include "tests/cli/tiny_recipe.h"

namespace godwit {
namespace {

namespace fs = std::filesystem;
using test::Outcome;
using test::run;

TEST(Train, RunDirectoryModelAndGeneration) {
  const testing::ScratchDir scratch;
  const fs::path out = fs::path(std::string(scratch / "run"));
  const Outcome o = run(test::train_arguments(out));
  ASSERT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.out.find("held-out bits per byte"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("zstd -19"), std::string::npos);
  EXPECT_NE(o.out.find("loss by position at context 512"), std::string::npos);
  int64_t steps = 0;
  std::ifstream metrics(out / "metrics.jsonl");
  for (std::string line; std::getline(metrics, line);) {
    const auto row = nlohmann::json::parse(line);
    EXPECT_EQ(row.at("step"), ++steps);
    for (const char* key : {"stage", "context", "tokens", "loss", "lr", "grad_norm", "tokens_per_s",
                            "max_vio", "dead_experts"}) {
      EXPECT_TRUE(row.contains(key)) << key;
    }
  }
  EXPECT_EQ(steps, 8);
  EXPECT_TRUE(fs::exists(out / "recipe.toml"));
  EXPECT_TRUE(fs::is_directory(out / "checkpoints" / "step-8"));

  const Outcome text = run(
      {"generate", "--model", (out / "model").string(), "--prompt", "And", "--max-tokens", "5", "--json"});
  ASSERT_EQ(text.code, 0) << text.err;
  EXPECT_LE(text.json().at("token_ids").size(), 5u);

  const Outcome again = run(test::train_arguments(out));
  EXPECT_EQ(again.code, 1);
  EXPECT_NE(again.err.find("holds a run already"), std::string::npos) << again.err;
}

TEST(Train, BadRecipesNameFileLineAndKey) {
  const testing::ScratchDir scratch;
  const fs::path out = fs::path(std::string(scratch / "run"));
  const Outcome unknown = run(test::train_arguments(out, {"optimizer.muon_rate=1.0"}));
  EXPECT_EQ(unknown.code, 1);
  EXPECT_NE(unknown.err.find("muon_rate"), std::string::npos) << unknown.err;
  const Outcome impossible = run(test::train_arguments(out, {"stage.0.context=-4"}));
  EXPECT_EQ(impossible.code, 1);
  EXPECT_NE(impossible.err.find("context"), std::string::npos) << impossible.err;
  const Outcome absent = run({"train", (out / "none.toml").string()});
  EXPECT_EQ(absent.code, 1);
  EXPECT_NE(absent.err.find("none.toml"), std::string::npos) << absent.err;
  EXPECT_FALSE(fs::exists(out));
}

}  // namespace
}  // namespace godwit
