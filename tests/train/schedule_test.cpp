#include "godwit/train/schedule.h"

#include <gtest/gtest.h>

namespace godwit {
namespace {

TEST(Schedule, WarmsUpLinearlyThenDecaysToTheFloor) {
  const ScheduleOptions o{.warmup = 0.1, .min_lr_ratio = 0.25};
  EXPECT_DOUBLE_EQ(lr_multiplier(o, 0.01), 0.1);
  EXPECT_DOUBLE_EQ(lr_multiplier(o, 0.05), 0.5);
  EXPECT_DOUBLE_EQ(lr_multiplier(o, 0.1), 1.0);
  EXPECT_DOUBLE_EQ(lr_multiplier(o, 0.55), 0.25 + 0.75 / 2);  // half way down the cosine
  EXPECT_DOUBLE_EQ(lr_multiplier(o, 1.0), 0.25);
  EXPECT_DOUBLE_EQ(lr_multiplier({.warmup = 0, .min_lr_ratio = 0}, 1.0), 0.0);
  EXPECT_DOUBLE_EQ(lr_multiplier({.warmup = 1, .min_lr_ratio = 0}, 1.0), 1.0);
  for (int i = 11; i < 100; ++i) EXPECT_LT(lr_multiplier(o, (i + 1) / 100.0), lr_multiplier(o, i / 100.0));
}

Recipe two_stages() {
  Recipe r;
  r.stages.resize(2);
  r.stages[0].batch_tokens = 100;
  r.stages[0].steps = 30;
  r.stages[1].batch_tokens = 1000;
  r.stages[1].steps = 1;
  return r;
}

TEST(Schedule, StagesShareTheProgressByTokens) {
  const auto plan = plan_stages(two_stages());
  EXPECT_EQ(plan[1].first_step, 30);
  EXPECT_EQ(plan[1].first_token, 3000);
  EXPECT_DOUBLE_EQ(plan[0].end, 0.75);
  EXPECT_DOUBLE_EQ(progress_after(plan[0], 15), 0.375);
  EXPECT_DOUBLE_EQ(progress_after(plan[0], 30), 0.75);
  EXPECT_EQ(progress_after(plan[1], 1), 1.0);
  EXPECT_THROW(progress_after(plan[1], 2), Error);
}

TEST(Schedule, TimeMovesProgressOnlyWithABudget) {
  Recipe r = two_stages();
  EXPECT_DOUBLE_EQ(progress_after(plan_stages(r)[0], 3, /*elapsed_s=*/1e9), 0.075);
  r.train.minutes = 1;
  r.stages[0].time_share = 0.5;
  r.stages[1].time_share = 0.5;
  const auto plan = plan_stages(r);
  EXPECT_DOUBLE_EQ(plan[0].end, 0.5);
  EXPECT_DOUBLE_EQ(progress_after(plan[0], 15, 1, 60), 0.25);  // ahead of the clock: by steps
  EXPECT_DOUBLE_EQ(progress_after(plan[0], 15, 24, 60), 0.4);  // behind it: by time
  EXPECT_DOUBLE_EQ(progress_after(plan[0], 15, 59, 60), 0.5);  // never past the stage
  EXPECT_DOUBLE_EQ(progress_after(plan[1], 0, 600, 60), 1.0);
}

}  // namespace
}  // namespace godwit
