#include "godwit/rl/advantage.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace godwit::rl {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::Pointwise;

constexpr double kClose = 1e-12;

void expect_near(const std::vector<double>& actual, const std::vector<double>& expected,
                 double tolerance = kClose) {
  EXPECT_THAT(actual, Pointwise(DoubleNear(tolerance), expected));
}

TEST(Advantage, GroupsAreByIdNotByPlace) {
  const std::vector<double> rewards = {1, 5, 0, 7, 0, 9};
  const std::vector<int64_t> groups = {3, 8, 3, 8, 3, 8};
  expect_near(group_advantages(Baseline::kCentred, rewards, groups), {2.0 / 3, -2, -1.0 / 3, 0, -1.0 / 3, 2});
  // Leave-one-out: 1 - (0 + 0) / 2, 0 - (1 + 0) / 2; 5 - (7 + 9) / 2, 7 - (5 + 9) / 2, 9 - (5 + 7) / 2.
  expect_near(group_advantages(Baseline::kLeaveOneOut, rewards, groups), {1, -3, -0.5, 0, -0.5, 3});
  const double std_a = std::sqrt(2.0) / 3 + 1e-6, std_b = std::sqrt(8.0 / 3) + 1e-6;
  expect_near(group_advantages(Baseline::kStandardised, rewards, groups),
              {2.0 / 3 / std_a, -2 / std_b, -1.0 / 3 / std_a, 0, -1.0 / 3 / std_a, 2 / std_b});
}

TEST(Advantage, AGroupOfOneTeachesNothing) {
  for (const Baseline b : {Baseline::kCentred, Baseline::kStandardised, Baseline::kLeaveOneOut})
    expect_near(group_advantages(b, std::vector<double>{4}, std::vector<int64_t>{0}), {0});
  EXPECT_TRUE(group_advantages(Baseline::kCentred, {}, {}).empty());
}

TEST(Advantage, GroupsWithoutVariance) {
  const std::vector<double> rewards = {0.1 + 0.2, 1, 0.3, 0};
  const std::vector<int64_t> groups = {0, 1, 0, 1};
  EXPECT_THAT(zero_variance(rewards, groups), ElementsAre(1, 0, 1, 0));
}

TEST(Advantage, ReturnsOfTurns) {
  expect_near(turn_returns(std::vector<double>{1, 0, 4}, 0.5), {2, 2, 4});
  EXPECT_TRUE(turn_returns({}, 0.5).empty());
}

EpisodeResult episode(int64_t group, double reward, std::vector<TurnOutcome> turns) {
  return {.group = group, .reward = reward, .turns = std::move(turns)};
}

TEST(Advantage, TurnsWithoutDiscountOrRewardsOfTheirOwnAreTheEpisode) {
  const std::vector<EpisodeResult> episodes = {episode(0, 1, {{1, 0}, {2, 0}, {3, 0}}),
                                               episode(0, 0, {{1, 0}}), episode(0, 0.25, {{1, 0}, {4, 0}})};
  for (const Baseline b : {Baseline::kCentred, Baseline::kStandardised, Baseline::kLeaveOneOut}) {
    const auto whole = turn_advantages({.baseline = b, .credit = Credit::kEpisode}, episodes);
    const auto turns = turn_advantages({.baseline = b, .credit = Credit::kTurns}, episodes);
    for (size_t i = 0; i < episodes.size(); ++i) expect_near(turns[i].turns, whole[i].turns);
  }
}

TEST(Advantage, DiscountedTurnsLieNearerToTheReward) {
  const std::vector<EpisodeResult> episodes = {episode(0, 1, {{1, 0}, {2, 0}}),
                                               episode(0, 0, {{1, 0}, {2, 0}})};
  // Returns (0.5, 1) and (0, 0); mean of the means (0.75, 0) is 0.375.
  const auto out = turn_advantages({.credit = Credit::kTurns, .discount = 0.5}, episodes);
  expect_near(out[0].turns, {0.125, 0.625});
  expect_near(out[1].turns, {-0.375, -0.375});
}

TEST(Advantage, StepGroupsCompareTurnsFromEqualStates) {
  // Both begin in state 1; state 2 is seen twice in group 0, state 9 once, and in group 5 state 1 is another.
  const std::vector<EpisodeResult> episodes = {
      episode(0, 1, {{1, 0}, {2, 0}}), episode(0, 0, {{1, 0}, {2, 0}, {9, 0}}), episode(5, 3, {{1, 0}})};
  const auto out = turn_advantages({.credit = Credit::kStepGroups, .step_weight = 2}, episodes);
  expect_near(out[0].turns, {0.5 + 2 * 0.5, 0.5 + 2 * 0.5});
  expect_near(out[1].turns, {-0.5 - 2 * 0.5, -0.5 - 2 * 0.5, -0.5});
  expect_near(out[2].turns, {0});
  EXPECT_FALSE(out[0].skipped);
  EXPECT_TRUE(out[2].skipped);
}

TEST(Advantage, TheLongWayRoundIsWorseInItsStepGroup) {
  // The same two states, but one episode visits state 1 twice before it goes on: with a discount, its first
  // visit earns less than its second.
  const std::vector<EpisodeResult> episodes = {episode(0, 1, {{1, 0}, {1, 0}, {2, 0}}),
                                               episode(0, 0, {{1, 0}})};
  const auto out = turn_advantages({.credit = Credit::kStepGroups, .discount = 0.5}, episodes);
  // Returns in state 1: 0.25, 0.5, 0; mean 0.25.
  expect_near(out[0].turns, {0.5 + 0, 0.5 + 0.25, 0.5 + 0});
  expect_near(out[1].turns, {-0.5 - 0.25});
}

TEST(Reward, PartsAndEfficiency) {
  const RewardOptions options{.success = 1, .process = 0.5, .efficiency = 0.2};
  EXPECT_NEAR(episode_reward(options, {.success = 1, .process = 0.5, .calls = 4, .redundant = 1}, 0),
              1 + 0.25 - 0.05, kClose);
  // Calls of a task that was not solved cost nothing: giving up early must not pay.
  EXPECT_NEAR(episode_reward(options, {.success = 0, .process = 0.5, .calls = 4, .redundant = 4}, 0), 0.25,
              kClose);
  EXPECT_NEAR(episode_reward(options, {.success = 1}, 0), 1, kClose);
}

TEST(Reward, BudgetOverridesEverythingAndTightens) {
  const RewardOptions options{.budget_start = 4, .budget_end = 1, .budget_steps = 10};
  EXPECT_NEAR(budget_factor(options, 0), 4, kClose);
  EXPECT_NEAR(budget_factor(options, 5), 2, kClose);  // geometric
  EXPECT_NEAR(budget_factor(options, 10), 1, kClose);
  EXPECT_NEAR(budget_factor(options, 99), 1, kClose);
  EXPECT_TRUE(std::isinf(budget_factor({}, 3)));
  const EpisodeOutcome solved{.success = 1, .counted = 201, .base_tokens = 100};
  EXPECT_EQ(episode_reward(options, solved, 0), 1);
  EXPECT_EQ(episode_reward(options, solved, 5), -1);
  EpisodeOutcome exact = solved;
  exact.counted = 400;
  EXPECT_EQ(episode_reward(options, exact, 0), 1);  // on the budget is within it
  exact.base_tokens = 0;
  EXPECT_EQ(episode_reward(options, exact, 99), 1);  // a task without a budget
}

TEST(Reward, SoftOverlong) {
  const RewardOptions options{.overlong_limit = 100, .overlong_buffer = 20};
  const auto reward = [&](int64_t counted) {
    return episode_reward(options, {.success = 1, .counted = counted}, 0);
  };
  EXPECT_NEAR(reward(80), 1, kClose);
  EXPECT_NEAR(reward(90), 0.5, kClose);
  EXPECT_NEAR(reward(100), 0, kClose);
  EXPECT_NEAR(reward(500), 0, kClose);
}

}  // namespace
}  // namespace godwit::rl
