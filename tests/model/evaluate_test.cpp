// Losses in pieces on a carried state against the logits of whole sequences.
#include "godwit/model/evaluate.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "tests/model/tiny.h"
#include "tests/support/compare.h"
#include "tests/support/files.h"

namespace godwit {
namespace {

using at::Tensor;

struct Case {
  ModelConfig config = test::tiny_config();
  ModelWeights weights = init_weights(config, 3, at::kCPU, at::kFloat);
};

Tensor expected_losses(const Case& c, const PackedBatch& batch, const Tensor& targets) {
  const at::NoGradGuard no_grad;
  const Tensor logits = forward_logits(c.config, c.weights, batch).to(at::kDouble);
  const Tensor ignored = targets.eq(-100);
  const Tensor nll = -at::log_softmax(logits, 1).gather(1, targets.clamp_min(0).unsqueeze(1)).squeeze(1);
  return nll.masked_fill(ignored, 0.0);
}

TEST(TokenLosses, PiecesEqualWhole) {
  const Case c;
  at::manual_seed(1);
  const std::vector<int64_t> lengths = {5, 0, 33, 1, 70, 2};
  const PackedBatch batch{.ids = at::randint(c.config.vocab_size, {111}, at::kLong),
                          .cu_seqlens = make_cu_seqlens(lengths)};
  Tensor targets = at::randint(c.config.vocab_size, {111}, at::kLong);
  targets[4] = -100;
  targets[110] = -100;
  const Tensor expected = expected_losses(c, batch, targets);
  for (const int64_t piece : {1000, 111, 64, 33, 16, 1}) {
    const Tensor losses = token_losses(c.config, c.weights, batch, targets, piece);
    EXPECT_TRUE(test::close(losses, expected, test::kFp32Model)) << "pieces of " << piece;
  }
}

TEST(TokenLosses, NoTokens) {
  const Case c;
  const PackedBatch batch{.ids = at::empty({0}, at::kLong), .cu_seqlens = make_cu_seqlens({0, 0})};
  EXPECT_EQ(token_losses(c.config, c.weights, batch, at::empty({0}, at::kLong)).numel(), 0);
  testing::expect_error([&] { token_losses(c.config, c.weights, batch, at::zeros({1}, at::kLong)); },
                        {"1 targets for 0 tokens"});
}

TEST(LikeliestTokens, EqualArgmaxOfLogits) {
  const Case c;
  at::manual_seed(2);
  const PackedBatch batch{.ids = at::randint(c.config.vocab_size, {40}, at::kLong),
                          .cu_seqlens = make_cu_seqlens({40})};
  const at::NoGradGuard no_grad;
  const Tensor hidden = forward_hidden(c.config, c.weights, batch);
  EXPECT_TRUE(test::bit_equal(likeliest_tokens(c.config, c.weights, hidden),
                              forward_logits(c.config, c.weights, batch).argmax(1)));
}

TEST(LossByPosition, BucketsArePowersOfTwo) {
  LossByPosition by_position;
  const Tensor losses = at::arange(12).to(at::kFloat);
  Tensor targets = at::ones({12}, at::kLong);
  targets[11] = -100;
  by_position.add(losses, targets, make_cu_seqlens({5, 0, 7}));
  const auto buckets = by_position.buckets();
  ASSERT_EQ(buckets.size(), 3u);
  // Tokens before the targets: 1 2 3 4 5 | 1 2 3 4 5 6 and one ignored; losses 0 to 10.
  EXPECT_EQ(buckets[0].begin, 1);
  EXPECT_EQ(buckets[0].end, 2);
  EXPECT_EQ(buckets[0].tokens, 2);
  EXPECT_DOUBLE_EQ(buckets[0].nats, (0 + 5) / 2.0);
  EXPECT_EQ(buckets[1].tokens, 4);
  EXPECT_DOUBLE_EQ(buckets[1].nats, (1 + 2 + 6 + 7) / 4.0);
  EXPECT_EQ(buckets[2].begin, 4);
  EXPECT_EQ(buckets[2].end, 8);
  EXPECT_DOUBLE_EQ(buckets[2].nats, (3 + 4 + 8 + 9 + 10) / 5.0);
  EXPECT_EQ(by_position.tokens(), 11);
  EXPECT_DOUBLE_EQ(by_position.total_nats(), 55.0);
}

}  // namespace
}  // namespace godwit
