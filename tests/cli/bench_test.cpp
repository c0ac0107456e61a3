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

}  // namespace
}  // namespace godwit
