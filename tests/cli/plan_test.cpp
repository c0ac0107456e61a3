// `godwit plan`, `report`, and the memory that `train` forecasts, as a user runs them.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/cli/program.h"
#include "tests/cli/tiny_recipe.h"

namespace godwit {
namespace {

namespace fs = std::filesystem;
using test::Outcome;
using test::run;

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(PlanCommand, AClusterAsJson) {
  const Outcome o = run({"plan", "kimi-k3", "--gpus", "1024", "--tokens", "15e12", "--json"});
  ASSERT_EQ(o.code, 0) << o.err;
  const nlohmann::json plan = o.json();
  EXPECT_EQ(plan.at("parameters").at("total"), 2779931837184);
  EXPECT_EQ(plan.at("checkpoint_bytes"), 1560860324864);
  EXPECT_EQ(plan.at("state").at("mla_bf16_bytes_per_token"), 27648);
  double sum = 0;
  for (const auto& [kind, bytes] : plan.at("memory_per_gpu").items())
    if (kind != "total") sum += bytes.get<double>();
  EXPECT_NEAR(sum, plan.at("memory_per_gpu").at("total").get<double>(), 1);
  sum = 0;
  for (const auto& [kind, bytes] : plan.at("communication_per_step").items())
    if (kind != "total") sum += bytes.get<double>();
  EXPECT_NEAR(sum, plan.at("communication_per_step").at("total").get<double>(), 1);
  EXPECT_GT(plan.at("step_time_s").get<double>(), 0);
  EXPECT_EQ(plan.at("tokens"), 15000000000000);
  EXPECT_NEAR(plan.at("gpu_hours").get<double>(), plan.at("training_time_s").get<double>() / 3600 * 1024, 1);
}

TEST(PlanCommand, WhatDoesNotFitIsOneLine) {
  const Outcome o = run({"plan", "kimi-k3", "--gpus", "8"});
  EXPECT_EQ(o.code, 1);
  EXPECT_EQ(o.err_lines(), 1);
  EXPECT_TRUE(has(o.err, "the nearest that does")) << o.err;
  EXPECT_EQ(o.out, "");
  EXPECT_EQ(run({"plan", "nano", "--tokens", "many"}).code, 2);
  EXPECT_EQ(run({"plan", "nano", "--tp", "2"}).code, 1);
}

TEST(TrainMemory, ABatchThatCannotFitIsRefusedBeforeMemoryIsTaken) {
  const testing::ScratchDir scratch;
  const fs::path out = fs::path(std::string(scratch / "run"));
  const Outcome o = run(test::train_arguments(out, {"stage.0.batch_tokens=1073741824"}));
  EXPECT_EQ(o.code, 1);
  EXPECT_EQ(o.err_lines(), 1) << o.err;
  EXPECT_TRUE(has(o.err, "1073741824 tokens at once need about")) << o.err;
  EXPECT_TRUE(has(o.err, "this fits: --set ")) << o.err;
  EXPECT_FALSE(fs::exists(out));  // nothing was begun
}

TEST(TrainMemory, PeakBesideTheForecastAndAReportOfTheRun) {
  const testing::ScratchDir scratch;
  const fs::path out = fs::path(std::string(scratch / "run"));
  const Outcome o = run(test::train_arguments(out));
  ASSERT_EQ(o.code, 0) << o.err;
  const size_t at = o.out.find("peak memory");
  ASSERT_NE(at, std::string::npos) << o.out;
  const size_t sign = o.out.find('(', at);
  const double percent = std::stod(o.out.substr(sign + 1));
  EXPECT_LT(std::abs(percent), 25) << o.out.substr(at);  // so small a model is mostly the process itself

  const Outcome report = run({"report", out.string()});
  ASSERT_EQ(report.code, 0) << report.err;
  EXPECT_EQ(report.out, (out / "report.html").string() + "\n");
  const std::string page = read_file((out / "report.html").string());
  for (const char* part :
       {"Loss by stage", "Loss by position", "Expert load", "MaxVio by layer", "gradient norm by depth",
        "activation norm", "Throughput", "short (128)", "passed"})
    EXPECT_TRUE(has(page, part)) << part;
  for (const char* missing : {"No gate was passed", "is measured when a run ends", "recorded no"})
    EXPECT_FALSE(has(page, missing)) << missing;

  const Outcome none = run({"report", std::string(scratch / "none")});
  EXPECT_EQ(none.code, 1);
  EXPECT_EQ(none.err_lines(), 1);
}

}  // namespace
}  // namespace godwit
