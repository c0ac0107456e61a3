#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "godwit/ops/ops.h"
#include "tests/support/compare.h"

namespace godwit {
namespace {

// The definition, one matrix at a time in fp64.
at::Tensor reference(const at::Tensor& batch, int64_t steps) {
  at::Tensor out = batch.to(at::kDouble).clone();
  for (int64_t n = 0; n < out.size(0); ++n) {
    const bool tall = out.size(1) > out.size(2);
    at::Tensor x = tall ? out[n].t() : out[n];
    x = x / (x.norm() + 1e-7);
    for (int64_t i = 0; i < steps; ++i) {
      const at::Tensor a = x.matmul(x.t());
      x = 3.4445 * x + (-4.7750 * a + 2.0315 * a.matmul(a)).matmul(x);
    }
    out[n].copy_(tall ? x.t() : x);
  }
  return out;
}

// A small singular value is amplified up to 3.4445^5 = 485 times, and with it the rounding of the Gram matrix
// in fp32.
constexpr double kLimit = 2e-4;

TEST(NewtonSchulz, EveryShapeAgreesWithTheDefinition) {
  at::manual_seed(1);
  for (const auto& [r, c] : std::vector<std::pair<int64_t, int64_t>>{{1, 1},
                                                                     {1, 7},
                                                                     {7, 1},
                                                                     {8, 16},
                                                                     {16, 8},
                                                                     {15, 17},
                                                                     {17, 15},
                                                                     {32, 64},
                                                                     {64, 32},
                                                                     {33, 100},
                                                                     {100, 33},
                                                                     {128, 200},
                                                                     {130, 129}}) {
    for (const int64_t steps : {0, 1, 5}) {
      const at::Tensor batch = at::randn({3, r, c}) * 0.01;
      at::Tensor actual = batch.clone();
      ops::newton_schulz_(actual, steps);
      EXPECT_TRUE(test::close(actual, reference(batch, steps), kLimit))
          << r << " x " << c << ", " << steps << " steps";
    }
  }
}

TEST(NewtonSchulz, LowRankZeroAndHugeMatrices) {
  at::manual_seed(2);
  at::Tensor batch = at::zeros({4, 32, 64});
  batch[1] = at::outer(at::randn({32}), at::randn({64}));
  batch[2] = at::randn({32, 64}) * 1e15;
  batch[3] = at::randn({32, 3}).matmul(at::randn({3, 64}));
  at::Tensor actual = batch.clone();
  ops::newton_schulz_(actual, 5);
  EXPECT_TRUE(test::close(actual, reference(batch, 5), kLimit));
  EXPECT_EQ(actual[0].abs().max().item<float>(), 0.0f);
}

TEST(NewtonSchulz, SingularValuesComeNearOne) {
  at::manual_seed(3);
  at::Tensor batch = at::randn({8, 32, 64});
  ops::newton_schulz_(batch, 5);
  const at::Tensor values = std::get<1>(at::linalg_svd(batch));
  EXPECT_GT(values.min().item<float>(), 0.6f);
  EXPECT_LT(values.max().item<float>(), 1.3f);
}

// What a GPU computes. Rounding to bf16 (2^-9 relative, each product) moves the singular values, not their
// range: the iteration pulls whatever it meets towards [0.7, 1.2].
TEST(NewtonSchulz, InBf16TheSingularValuesComeNearOneToo) {
  at::manual_seed(5);
  for (const auto& [r, c] : std::vector<std::pair<int64_t, int64_t>>{{32, 64}, {96, 24}, {150, 200}}) {
    at::Tensor batch = at::randn({4, r, c}) * 1e-3, exact = batch.clone();
    ops::newton_schulz_(exact, 5);
    ops::newton_schulz_(batch, 5, at::kBFloat16);
    const at::Tensor values = std::get<1>(at::linalg_svd(batch));
    EXPECT_GT(values.min().item<float>(), 0.3f);
    EXPECT_LT(values.max().item<float>(), 1.3f);
    // The direction of the update is the same: the angle between the two is small.
    const at::Tensor cosine = (batch * exact).sum({1, 2}) / (batch.norm(2, {1, 2}) * exact.norm(2, {1, 2}));
    EXPECT_GT(cosine.min().item<float>(), 0.99f);
    EXPECT_EQ(batch.scalar_type(), at::kFloat);
  }
}

TEST(NewtonSchulz, AMatrixDoesNotDependOnItsBatch) {
  at::manual_seed(4);
  const at::Tensor batch = at::randn({37, 24, 40});
  at::Tensor together = batch.clone();
  ops::newton_schulz_(together, 5);
  for (const int64_t n : {0, 18, 36}) {
    at::Tensor alone = batch.slice(0, n, n + 1).clone();
    ops::newton_schulz_(alone, 5);
    EXPECT_TRUE(test::bit_equal(together.slice(0, n, n + 1), alone));
  }
}

}  // namespace
}  // namespace godwit
