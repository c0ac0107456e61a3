// Learning-rate schedule and the plan of a run's stages: pure functions. Progress runs from 0 to 1 over the
// whole run, not over a stage: the report decays once, with a cosine, across all context stages
// (arXiv:2607.24653 section 3).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <vector>

#include "godwit/base/check.h"
#include "godwit/train/recipe.h"

namespace godwit {

// Factor on the peak learning rate for the step that ends at `progress` in (0, 1]: linear up to 1 over the
// first `warmup` share, then a cosine to exactly `min_lr_ratio` at 1.
inline double lr_multiplier(const ScheduleOptions& o, double progress) {
  progress = std::clamp(progress, 0.0, 1.0);
  if (progress < o.warmup) return progress / o.warmup;
  const double decayed = o.warmup < 1 ? (progress - o.warmup) / (1 - o.warmup) : 0.0;
  return o.min_lr_ratio + (1 - o.min_lr_ratio) * 0.5 * (1 + std::cos(std::numbers::pi * decayed));
}

struct StagePlan {
  int64_t first_step = 0;  // of the run, from 0
  int64_t steps = 0;
  int64_t first_token = 0;  // tokens before the stage
  int64_t step_tokens = 0;
  double begin = 0, end = 0;  // progress
};

// Where the stages lie. A stage's share of the progress is its share of the tokens, or its time_share when
// the run is fitted into train.minutes.
inline std::vector<StagePlan> plan_stages(const Recipe& recipe) {
  std::vector<StagePlan> plan;
  int64_t step = 0, token = 0;
  for (const StageOptions& s : recipe.stages) {
    plan.push_back(
        {.first_step = step, .steps = s.steps, .first_token = token, .step_tokens = s.batch_tokens});
    step += s.steps;
    token += s.steps * s.batch_tokens;
  }
  double begin = 0;
  for (size_t i = 0; i < plan.size(); ++i) {
    StagePlan& p = plan[i];
    const bool timed = recipe.train.minutes > 0 && recipe.stages[i].time_share > 0;
    const double share = timed ? recipe.stages[i].time_share
                               : static_cast<double>(p.steps * p.step_tokens) / static_cast<double>(token);
    p.begin = begin;
    p.end = i + 1 == plan.size() ? 1.0 : begin + share;
    begin = p.end;
  }
  return plan;
}

// Progress after `done` of the stage's steps. With a time budget (budget_s > 0) it is at least the share of
// the budget spent, elapsed_s / budget_s, so that a slow machine still ends with a finished decay; the run
// then depends on the clock. Without one it is a function of the step alone. A stage is over when this
// reaches its end.
inline double progress_after(const StagePlan& stage, int64_t done, double elapsed_s = 0,
                             double budget_s = 0) {
  check(done >= 0 && done <= stage.steps, "schedule: {} steps done in a stage of {}", done, stage.steps);
  if (done == stage.steps) return stage.end;
  const double by_steps =
      stage.begin + (stage.end - stage.begin) * static_cast<double>(done) / static_cast<double>(stage.steps);
  const double by_time = budget_s > 0 ? elapsed_s / budget_s : 0.0;
  return std::min(std::max(by_steps, by_time), stage.end);
}

}  // namespace godwit
