// linear_cross_entropy against all logits in fp64.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "godwit/ops/ops.h"
#include "godwit/ops/ref/linear_cross_entropy_ref.h"
#include "tests/support/gradients.h"

namespace godwit {
namespace {

using at::Tensor;

constexpr int64_t kVocabulary = 301, kWidth = 24;

struct Batch {
  std::vector<Tensor> inputs;  // x, head, weights
  Tensor targets;
};

Batch make_batch(int64_t tokens, int64_t vocabulary = kVocabulary) {
  at::manual_seed(1);
  Batch b{{at::randn({tokens, kWidth}), at::randn({vocabulary, kWidth}), at::rand({tokens})},
          at::randint(vocabulary, {tokens}, at::kLong)};
  if (tokens > 2) {
    b.targets[1] = -100;
    b.inputs[2][2] = 0;
  }
  return b;
}

TEST(LinearCrossEntropy, MatchesOracle) {
  for (const int64_t tokens : {0, 1, 15, 16, 17, 63, 64, 65, 257}) {
    const Batch b = make_batch(tokens);
    const auto wide = test::to_double(b.inputs);
    const auto [loss, nll] = ops::linear_cross_entropy(b.inputs[0], b.inputs[1], b.targets, b.inputs[2]);
    const auto [loss64, nll64] = ops::ref::linear_cross_entropy(wide[0], wide[1], b.targets, wide[2]);
    EXPECT_TRUE(test::close(loss, loss64, test::kFp32));
    EXPECT_TRUE(test::close(nll, nll64, test::kFp32));
    if (tokens > 2) {
      EXPECT_EQ(nll[1].item<float>(), 0.0f);
    }
    const test::TensorFn op = [&](const auto& x) {
      return std::get<0>(ops::linear_cross_entropy(x[0], x[1], b.targets, x[2]));
    };
    const test::TensorFn oracle = [&](const auto& x) {
      return std::get<0>(ops::ref::linear_cross_entropy(x[0], x[1], b.targets, x[2]));
    };
    const Tensor projection = at::full({}, 0.7);
    const auto got = test::gradients(op, b.inputs, projection);
    const auto expected = test::gradients(oracle, wide, projection);
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(test::close(got[i], expected[i], test::kFp32Grad)) << "input " << i << ", T " << tokens;
    }
  }
}

// More rows than one chunk holds.
TEST(LinearCrossEntropy, SeveralChunks) {
  const Batch b = make_batch(2100);
  const auto wide = test::to_double(b.inputs);
  const auto [loss, nll] = ops::linear_cross_entropy(b.inputs[0], b.inputs[1], b.targets, b.inputs[2]);
  const auto [loss64, nll64] = ops::ref::linear_cross_entropy(wide[0], wide[1], b.targets, wide[2]);
  EXPECT_TRUE(test::close(loss, loss64, test::kFp32));
  EXPECT_TRUE(test::close(nll, nll64, test::kFp32));
}

TEST(LinearCrossEntropy, Bf16Inputs) {
  const Batch b = make_batch(65);
  const Tensor x = b.inputs[0].to(at::kBFloat16), head = b.inputs[1].to(at::kBFloat16);
  const auto [loss, nll] = ops::linear_cross_entropy(x, head, b.targets, b.inputs[2]);
  const auto [loss64, nll64] = ops::ref::linear_cross_entropy(x.to(at::kDouble), head.to(at::kDouble),
                                                              b.targets, b.inputs[2].to(at::kDouble));
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  EXPECT_TRUE(test::close(loss, loss64, test::kFp32));
  EXPECT_TRUE(test::close(nll, nll64, test::kFp32));
}

TEST(LinearCrossEntropy, GradientMatchesFiniteDifference) {
  const Batch b = make_batch(17);
  EXPECT_TRUE(test::matches_finite_difference(
      [&](const auto& x) { return std::get<0>(ops::linear_cross_entropy(x[0], x[1], b.targets, x[2])); },
      test::to_double(b.inputs), at::ones({}, at::kDouble)));
}

TEST(LinearCrossEntropy, RefusesBadArguments) {
  const Batch b = make_batch(4);
  Tensor outside = b.targets.clone();
  outside[0] = kVocabulary;
  EXPECT_THROW(ops::linear_cross_entropy(b.inputs[0], b.inputs[1], outside, b.inputs[2]), c10::Error);
  EXPECT_THROW(ops::linear_cross_entropy(b.inputs[0], b.inputs[1].narrow(1, 0, 8), b.targets, b.inputs[2]),
               c10::Error);
  EXPECT_THROW(ops::linear_cross_entropy(b.inputs[0], b.inputs[1], b.targets.to(at::kInt), b.inputs[2]),
               c10::Error);
}

}  // namespace
}  // namespace godwit
