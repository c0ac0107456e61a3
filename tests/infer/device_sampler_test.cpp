#include "godwit/infer/device_sampler.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>

#include "godwit/infer/sampler.h"

namespace godwit {
namespace {

// What the host draws, row by row, with the same log-probability; around the borders of blocks too.
TEST(DeviceSampler, DrawsWhatTheHostDraws) {
  at::manual_seed(4);
  for (const int64_t vocabulary : {1, 5, 511, 512, 513, 3000}) {
    const at::Tensor logits = at::randn({7, vocabulary}) * 3;
    const at::Tensor none = at::zeros({vocabulary}, at::kBool);
    at::Tensor some = at::rand({vocabulary}) < 0.5;
    some[vocabulary / 2] = false;
    const SamplingParams kinds[] = {
        {.temperature = 0}, {.seed = 9}, {.temperature = 0.3, .seed = 10}, {.temperature = 2, .seed = 11}};
    for (int64_t position = 0; position < 30; ++position) {
      std::vector<DeviceDraw> draws;
      for (int64_t i = 0; i < 12; ++i)
        draws.push_back({.row = i % 7,
                         .params = &kinds[i % 4],
                         .position = position,
                         .forbidden = i % 3 == 0 ? some : none});
      const auto drawn = draw_on_device(logits, draws);
      ASSERT_EQ(drawn.size(), draws.size());
      for (size_t i = 0; i < draws.size(); ++i) {
        const Sampled one = sample(logits[draws[i].row], *draws[i].params, position, draws[i].forbidden);
        EXPECT_EQ(drawn[i].error, "");
        EXPECT_EQ(drawn[i].sampled.id, one.id) << vocabulary << " " << position << " " << i;
        EXPECT_NEAR(drawn[i].sampled.logprob, one.logprob, 1e-9);
      }
    }
  }
}

TEST(DeviceSampler, ARowWithNanOrWithoutATokenIsAloneInItsFault) {
  at::Tensor logits = at::zeros({3, 600});
  logits[1][7] = std::numeric_limits<float>::quiet_NaN();
  const at::Tensor none = at::zeros({600}, at::kBool), all = at::ones({600}, at::kBool);
  const SamplingParams params{.seed = 3};
  const auto drawn = draw_on_device(logits, {{.row = 0, .params = &params, .position = 5, .forbidden = none},
                                             {.row = 1, .params = &params, .position = 6, .forbidden = none},
                                             {.row = 2, .params = &params, .position = 7, .forbidden = all}});
  EXPECT_EQ(drawn[0].error, "");
  EXPECT_NE(drawn[1].error.find("position 6 is NaN"), std::string::npos) << drawn[1].error;
  EXPECT_NE(drawn[2].error.find("no token"), std::string::npos) << drawn[2].error;
}

TEST(DeviceSampler, LeavesCutsAndPenaltiesToTheHost) {
  EXPECT_TRUE(draws_on_device({.temperature = 0.7, .seed = 4}));
  EXPECT_FALSE(draws_on_device({.top_p = 0.9}));
  EXPECT_FALSE(draws_on_device({.top_k = 5}));
  EXPECT_FALSE(draws_on_device({.min_p = 0.1}));
  EXPECT_FALSE(draws_on_device({.presence_penalty = 0.5}));
  EXPECT_FALSE(draws_on_device({.repetition_penalty = 1.1}));
  EXPECT_FALSE(draws_on_device({.logit_bias = {{1, 2.0}}}));
  EXPECT_FALSE(draws_on_device({.policy_logprob = true}));
}

}  // namespace
}  // namespace godwit
