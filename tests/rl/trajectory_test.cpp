#include "godwit/rl/trajectory.h"

#include <gtest/gtest.h>

namespace godwit::rl {
namespace {

TEST(Trajectory, CallsThatNoToolUnderstandsAreStepsThatWereNotRight) {
  Trajectory t;
  t.turns = {{.calls = 2, .checked = 2, .valid = 2}, {.calls = 1, .faults = 1}};
  EXPECT_EQ(t.outcome().process, 1.0);
  t.turns.push_back({.calls = 2, .wrong = 2});
  EXPECT_EQ(t.outcome().process, 0.5);
  EXPECT_EQ(t.outcome().calls, 5);
}

}  // namespace
}  // namespace godwit::rl
