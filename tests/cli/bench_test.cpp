// `godwit bench`: that it runs and what it prints; a timing decides nothing.
#include <gtest/gtest.h>

#include "tests/cli/program.h"

namespace godwit {
namespace {

using test::Outcome;
using test::run;

TEST(Bench, KdaPrintsOneObject) {
  const Outcome o = run({"bench", "kda", "--tokens", "64", "--heads", "1", "--repeats", "1", "--json"});
  ASSERT_EQ(o.code, 0) << o.err;
  const auto json = o.json();
  EXPECT_EQ(json.at("device"), "cpu");
  EXPECT_EQ(json.at("tokens"), 64);
  for (const char* key : {"forward_ms", "forward_backward_ms", "recurrence_ms", "recurrence_ratio",
                          "step_32_sequences_ms", "forward_gflops"})
    EXPECT_GT(json.at(key).get<double>(), 0) << key;
}

TEST(Bench, KdaRefusesUnequalSequences) {
  const Outcome o = run({"bench", "kda", "--tokens", "10", "--sequences", "3"});
  EXPECT_EQ(o.code, 1);
  EXPECT_NE(o.err.find("--tokens 10"), std::string::npos) << o.err;
}

// A model of two small layers: one KDA, one MLA, both with experts but the first.
constexpr const char* kSmall =
    R"({"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_token": 2, "vocab_size": 512,)"
    R"( "linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2]}})";

TEST(Bench, TrainTimesThePartsOfAStep) {
  const Outcome o = run({"bench", "train", "--override", kSmall, "--tokens", "64", "--sequences", "2",
                         "--repeats", "1", "--profile", "--json"});
  ASSERT_EQ(o.code, 0) << o.err;
  const auto json = o.json();
  const Outcome no_ids = run({"bench", "train", "--override", R"({"vocab_size": 256})"});
  EXPECT_EQ(no_ids.code, 1);
  EXPECT_NE(no_ids.err.find("vocab_size must be above 256, got 256"), std::string::npos) << no_ids.err;
  for (const char* part : {"forward", "forward_backward", "step"})
    for (const char* key : {"ms", "median_ms", "tokens_per_s", "flops_per_s"})
      EXPECT_GT(json.at(part).at(key).get<double>(), 0) << part << "." << key;
  EXPECT_GT(json.at("peak_bytes_step").get<double>(),
            json.at("peak_bytes_forward_backward").get<double>() / 2);
  // What is nested in an op is not counted twice: the ops fit into the wall clock (one thread runs them, one
  // more the backward).
  const auto& profile = json.at("profile");
  EXPECT_LE(profile.at("busy_ms").get<double>(), 1.01 * profile.at("wall_ms").get<double>());
  bool linear = false;
  for (const auto& op : profile.at("ops")) {
    EXPECT_GE(op.at("ms").get<double>(), 0) << op;
    linear |= op.at("name") == "godwit::linear_bwd";
  }
  EXPECT_TRUE(linear) << profile.dump();
  EXPECT_EQ(o.err, "");
}

TEST(Bench, TrainNamesAWrongConfigurationKey) {
  const Outcome o = run({"bench", "train", "--override", R"({"num_expertz": 8})"});
  EXPECT_EQ(o.code, 1);
  EXPECT_NE(o.err.find("num_expertz"), std::string::npos) << o.err;
}

TEST(Bench, DecodeByBatchAndCachedTokensWithPackedWeights) {
  const Outcome o =
      run({"bench", "decode", "--model", "nano", "--batch", "1,3", "--cached", "5,70", "--prefill", "65",
           "--steps", "2", "--repeats", "1", "--weights", "mxfp4+int8", "--synthetic", "--json"});
  ASSERT_EQ(o.code, 0) << o.err;
  const auto json = o.json();
  EXPECT_LT(json.at("weight_bytes").get<double>(), 60e6);  // 184 MB in f32
  EXPECT_EQ(json.at("prefill").at("tokens"), 65);
  ASSERT_EQ(json.at("decode").size(), 4u);
  for (const auto& row : json.at("decode"))
    for (const char* key : {"step_ms", "tokens_per_s", "state_bytes", "step_bytes", "times_floor"})
      EXPECT_GT(row.at(key).get<double>(), 0) << key;
}

TEST(Bench, EngineAnswersAreThoseAlone) {
  const Outcome o =
      run({"bench", "engine", "--model", "nano", "--dtype", "f32", "--requests", "4", "--prompt", "70",
           "--tokens", "5", "--max-sequences", "3", "--deterministic", "--check", "--json"});
  ASSERT_EQ(o.code, 0) << o.err;
  const auto out = o.json();
  EXPECT_EQ(out["drawn_tokens"], 20);
  EXPECT_EQ(out["alone"]["same_bits"], 4);
  EXPECT_LT(out["forward"]["mean"], 1e-4);
  EXPECT_GT(out["first_token_ms"]["p50"], 0);
}

TEST(Bench, EngineAnswersAreThoseWithoutDrafts) {
  const Outcome o = run({"bench", "engine", "--model", "nano", "--dtype", "f32", "--text",
                         GODWIT_FIXTURES "/tiny/data/heldout.txt", "--requests", "3", "--prompt", "60",
                         "--tokens", "12", "--draft-tokens", "3", "--check", "--json"});
  ASSERT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(o.json()["drawn_tokens"], 36);
  EXPECT_EQ(o.json()["undrafted"]["same_bits"], 3);
  EXPECT_EQ(run({"bench", "engine", "--model", "nano", "--text", "/nowhere"}).code, 1);
}

TEST(Bench, EngineRefusesAPromiseItCannotKeep) {
  const Outcome o = run({"bench", "engine", "--model", "nano", "--dtype", "bf16", "--deterministic"});
  EXPECT_EQ(o.code, 1);
  EXPECT_NE(o.err.find("fp32"), std::string::npos) << o.err;
}

}  // namespace
}  // namespace godwit
