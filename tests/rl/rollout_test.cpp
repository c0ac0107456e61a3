#include "godwit/rl/rollout.h"

#include <gtest/gtest.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "godwit/rl/replay.h"
#include "tests/rl/tiny_policy.h"

namespace godwit::rl {
namespace {

using nlohmann::json;
using Groups = std::vector<std::vector<Trajectory>>;

RolloutOptions options() {
  test::register_chatter();
  RolloutOptions o;
  o.environments = {{.name = "chatter"}};
  o.groups = 3;
  o.samples = 4;
  o.turn_tokens = 40;
  o.context = 400;
  o.concurrent = 5;
  o.seed = 9;
  return o;
}

void expect_replays(const LoadedModel& model, const Groups& groups, double temperature, int64_t version) {
  std::vector<const Trajectory*> all;
  for (const auto& group : groups)
    for (const Trajectory& t : group) all.push_back(&t);
  const auto replayed = replay(model, all, rollout_forbidden(model), temperature, /*together=*/5);
  int64_t compared = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    std::vector<uint8_t> drawn(all[i]->ids.size(), 0);
    for (const Segment& s : all[i]->segments) {
      for (int64_t at = s.begin; at < s.end; ++at) {
        drawn[at] = 1;
        if (!s.is_of(version)) continue;
        ++compared;
        ASSERT_EQ(replayed[i].logp[at], all[i]->logp[at]) << "group " << all[i]->group << " token " << at;
        EXPECT_LT(all[i]->logp[at], 0);
        EXPECT_GT(replayed[i].entropy[at], 0);
      }
    }
    for (size_t at = 0; at < drawn.size(); ++at) {
      if (drawn[at] == 0) {
        EXPECT_EQ(replayed[i].logp[at], 0);
        EXPECT_EQ(all[i]->logp[at], 0);
      }
    }
  }
  EXPECT_GT(compared, 10);
}

void change(LoadedModel& model) {
  for_each_param(model.config, model.weights, [](const ParamInfo&, at::Tensor& value) { value.mul_(1.01); });
}

// The same calls in the same batches and order, tokens forced; phases that stop in the middle of turns.
TEST(Rollout, APhaseIsRepeatedTokenByToken) {
  const LoadedModel model = test::tiny_policy(3);
  RolloutOptions o = options();
  o.finish_share = 0.5;
  Rollouts rollouts(model, o);
  int64_t compared = 0, suspended = 0;
  for (int64_t version = 0; version < 4; ++version) {
    const Groups groups = rollouts.run(version);
    suspended += rollouts.suspended();
    const int64_t steps = rollouts.engine_stats().steps;
    const Rollouts::Repeated repeated = rollouts.repeat();
    EXPECT_GT(rollouts.engine_stats().steps, steps);
    for (const auto& group : groups) {
      for (const Trajectory& t : group) {
        std::map<int64_t, double> logp;
        const auto found = repeated.find({t.group, t.sample});
        if (found != repeated.end())
          for (const Rollouts::Token& token : found->second) logp.emplace(token.at, token.logp);
        size_t expected = 0;
        for (const Segment& s : t.segments) {
          if (s.version != version) continue;
          for (int64_t at = s.begin; at < s.end; ++at, ++expected) {
            ASSERT_TRUE(logp.contains(at)) << at;
            EXPECT_EQ(logp.at(at), t.logp[at]);
          }
        }
        EXPECT_EQ(logp.size(), expected);
        compared += static_cast<int64_t>(expected);
      }
    }
  }
  EXPECT_GT(compared, 200);
  EXPECT_GT(suspended, 0);
}

TEST(Rollout, TokensAreKeptAndAppendedToNeverEncodedAgain) {
  const LoadedModel model = test::tiny_policy(3);
  Rollouts rollouts(model, options());
  const Groups groups = rollouts.run(0);
  ASSERT_EQ(groups.size(), 3u);
  const int32_t end = model.tokenizer.special_id(kEndOfMsg);
  int64_t several = 0;
  for (const auto& group : groups) {
    ASSERT_EQ(group.size(), 4u);
    for (const Trajectory& t : group) {
      EXPECT_TRUE(t.done);
      EXPECT_EQ(t.task_seed, group.front().task_seed);
      ASSERT_EQ(t.logp.size(), t.ids.size());
      ASSERT_EQ(t.segments.size(), t.turns.size());  // no pauses
      for (size_t k = 0; k < t.turns.size(); ++k) {
        EXPECT_EQ(t.segments[k].begin, t.turns[k].begin);
        EXPECT_EQ(t.segments[k].end, t.turns[k].end);
        EXPECT_LE(t.turns[k].end - t.turns[k].begin, 40);
        if (k + 1 < t.turns.size()) {
          EXPECT_EQ(t.ids[t.turns[k].end - 1], end);
        }
      }
      // What lies between two turns is the user's line, as the chat format writes it, and nothing else.
      for (size_t k = 0; k + 1 < t.turns.size(); ++k) {
        const std::string between = model.tokenizer.decode(std::span(t.ids).subspan(
            static_cast<size_t>(t.turns[k].end), static_cast<size_t>(t.turns[k + 1].begin - t.turns[k].end)));
        EXPECT_EQ(between,
                  "<|open|>message role=\"user\"<|sep|>And then? \xc3\xa9t\xc3\xa9 "
                  "<|close|>message<|sep|><|end_of_msg|>"
                  "<|open|>message role=\"assistant\"<|sep|><|open|>response<|sep|>");
        ++several;
      }
    }
    EXPECT_NE(group[0].ids, group[1].ids);
  }
  EXPECT_GT(several, 3);
  // One prompt for a group, and each episode's own beginning for its later turns.
  EXPECT_GT(rollouts.engine_stats().cached_tokens, 500);
  expect_replays(model, groups, 1, 0);
}

TEST(Rollout, TheTrainersReplayEqualsTheEngineAtAnyTemperature) {
  const LoadedModel model = test::tiny_policy(4);
  for (const double temperature : {0.5, 1.7}) {
    RolloutOptions o = options();
    o.temperature = temperature;
    expect_replays(model, Rollouts(model, o).run(0), temperature, 0);
  }
}

TEST(Rollout, WhatRunsBesideChangesNothing) {
  const LoadedModel model = test::tiny_policy(5);
  RolloutOptions one = options(), many = options();
  one.concurrent = 1;
  many.concurrent = 12;
  const Groups a = Rollouts(model, one).run(0), b = Rollouts(model, many).run(0);
  EXPECT_EQ(json(a).dump(), json(b).dump());
}

TEST(Rollout, APhaseStopsEarlyAndGoesOnFirstWithTheNewWeights) {
  LoadedModel model = test::tiny_policy(6);
  RolloutOptions o = options();
  o.groups = 6;
  o.samples = 2;
  o.finish_share = 0.4;
  o.max_staleness = 1;
  Rollouts rollouts(model, o);
  int64_t mixed = 0, suspended = 0;
  for (int64_t version = 0; version < 6; ++version) {
    const Groups groups = rollouts.run(version);
    EXPECT_GE(groups.size(), 1u);
    suspended += rollouts.suspended();
    for (const auto& group : groups) {
      for (const Trajectory& t : group) {
        EXPECT_TRUE(t.done);
        EXPECT_GE(t.oldest_version(), version - 1);
        for (size_t i = 1; i < t.segments.size(); ++i) {
          EXPECT_GE(t.segments[i].begin, t.segments[i - 1].end);
          mixed += t.segments[i].version != t.segments[i - 1].version;
        }
      }
    }
    expect_replays(model, groups, 1, version);
    change(model);
  }
  EXPECT_GT(suspended, 0);
  EXPECT_GT(mixed, 0);
}

TEST(Rollout, SavedEpisodesGoOnAsIfNothingHadHappened) {
  LoadedModel model = test::tiny_policy(7);
  RolloutOptions o = options();
  o.finish_share = 0.5;
  o.groups = 5;
  Rollouts straight(model, o), first(model, o);
  straight.run(0);
  first.run(0);
  EXPECT_GT(first.suspended(), 0);
  const Rollouts::Saved saved = first.save();
  EXPECT_TRUE(saved.states.empty());
  Rollouts second(model, o);
  second.load(saved);
  EXPECT_EQ(second.save().episodes, saved.episodes);
  change(model);
  for (int64_t version = 1; version < 4; ++version) {
    EXPECT_EQ(json(straight.run(version)).dump(), json(second.run(version)).dump());
    change(model);
  }
}

// A phase paused at every third step of the engine, each time gone on with in new rollouts from what was
// saved, against one without a pause: the same tokens and log-probabilities.
TEST(Rollout, APhaseGoesOnAtTheTokenWhereItWasPaused) {
  const LoadedModel model = test::tiny_policy(9);
  RolloutOptions o = options();
  o.prefill_tokens = kLatentPage;  // pauses within prompts too
  const Groups whole = Rollouts(model, o).run(0);
  auto rollouts = std::make_unique<Rollouts>(model, o);
  Groups parts;
  int64_t pauses = 0, states = 0;
  for (;; ++pauses) {
    int64_t steps = 0;
    parts = rollouts->run(0, [&](const RolloutProgress&) { return ++steps % 3 != 0; });
    if (!rollouts->paused()) break;
    const Rollouts::Saved saved = rollouts->save();
    states += !saved.states.empty();
    rollouts = std::make_unique<Rollouts>(model, o);
    rollouts->load(saved);
    EXPECT_EQ(rollouts->save().episodes, saved.episodes);
  }
  EXPECT_GT(pauses, 20);
  EXPECT_GT(states, 20);
  EXPECT_EQ(json(parts).dump(), json(whole).dump());
  EXPECT_LT(rollouts->engine_stats().prompt_tokens,
            100);  // the last part read nothing anew but what was said
  expect_replays(model, parts, 1, 0);
}

// Suspended episodes that keep what older weights have read: the same as an engine that is never stopped and
// whose weights change under its running sequences.
TEST(Rollout, StatesAreKeptOverAnUpdate) {
  LoadedModel model = test::tiny_policy(6);
  RolloutOptions o = options();
  o.groups = 6;
  o.samples = 2;
  o.finish_share = 0.4;
  o.keep_states = true;
  Rollouts rollouts(model, o);
  int64_t on_old_states = 0, read_anew = 0;
  for (int64_t version = 0; version < 6; ++version) {
    const Groups groups = rollouts.run(version);
    expect_replays(model, groups, 1, version);
    for (const auto& group : groups) {
      for (const Trajectory& t : group) {
        for (size_t i = 0; i < t.segments.size(); ++i) {
          const Segment& s = t.segments[i];
          EXPECT_LE(s.state, s.version);
          EXPECT_GE(s.state, s.version - o.max_staleness);
          on_old_states += s.state < s.version;
          read_anew += i > 0 && s.version != t.segments[i - 1].version && s.state == s.version;
        }
      }
    }
    change(model);
  }
  EXPECT_GT(on_old_states, 3);
  EXPECT_GT(read_anew, 0);  // those that would have become too old
}

TEST(Rollout, WithoutStalenessEveryPhaseIsWhole) {
  const LoadedModel model = test::tiny_policy(8);
  RolloutOptions o = options();
  o.finish_share = 0.1;
  o.max_staleness = 0;
  Rollouts rollouts(model, o);
  EXPECT_EQ(rollouts.run(0).size(), 3u);
  EXPECT_EQ(rollouts.suspended(), 0);
}

}  // namespace
}  // namespace godwit::rl
