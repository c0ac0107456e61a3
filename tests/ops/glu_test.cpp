// glu against its fp64 composition, with and without the bounds.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "godwit/ops/ops.h"
#include "godwit/ops/ref/glu_ref.h"
#include "tests/support/gradients.h"

namespace godwit {
namespace {

using at::Tensor;

struct Form {
  double beta_gate;
  double beta_up;
};
constexpr Form kForms[] = {{4, 25}, {0, 0}, {4, 0}, {0, 25}, {1.5, 0.5}};

test::TensorFn op_of(Form f) {
  return [f](const auto& x) { return ops::glu(x[0], x[1], f.beta_gate, f.beta_up); };
}
test::TensorFn oracle_of(Form f) {
  return [f](const auto& x) { return ops::ref::glu(x[0], x[1], f.beta_gate, f.beta_up); };
}

TEST(Glu, MatchesOracle) {
  at::manual_seed(1);
  for (const Form f : kForms) {
    for (const int64_t n : {0, 1, 15, 16, 17, 63, 64, 65, 257}) {
      const std::vector<Tensor> inputs = {at::randn({n, 3}) * 3, at::randn({n, 3}) * 3};
      const auto wide = test::to_double(inputs);
      EXPECT_TRUE(test::close(op_of(f)(inputs), oracle_of(f)(wide), test::kFp32));
      const Tensor projection = at::randn({n, 3});
      const auto got = test::gradients(op_of(f), inputs, projection);
      const auto expected = test::gradients(oracle_of(f), wide, projection);
      for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(test::close(got[i], expected[i], test::kFp32Grad));
    }
  }
}

// Elementwise, from tiny values (where tanh by exponentials would cancel) to saturation: each relative to
// itself.
TEST(Glu, RelativeErrorOverTheWholeRange) {
  const Tensor size = at::logspace(-6, 2, 1000);
  for (const Form f : kForms) {
    for (const double sign_g : {-1.0, 1.0}) {
      const Tensor g = (size * sign_g).clamp_min(-60), u = size.flip(0) * 0.7;
      const Tensor expected = ops::ref::glu(g.to(at::kDouble), u.to(at::kDouble), f.beta_gate, f.beta_up);
      const Tensor got = ops::glu(g, u, f.beta_gate, f.beta_up).to(at::kDouble);
      EXPECT_TRUE(test::close(got / expected, at::ones_like(expected), test::kFp32));
    }
  }
}

TEST(SigmoidGate, MatchesOracle) {
  at::manual_seed(2);
  const test::TensorFn op = [](const auto& x) { return ops::sigmoid_gate(x[0], x[1]); };
  const test::TensorFn oracle = [](const auto& x) { return ops::ref::sigmoid_gate(x[0], x[1]); };
  for (const int64_t n : {0, 1, 15, 16, 17, 63, 64, 65, 257}) {
    const std::vector<Tensor> inputs = {at::randn({n, 3}), at::randn({n, 3}) * 4};
    const auto wide = test::to_double(inputs);
    EXPECT_TRUE(test::close(op(inputs), oracle(wide), test::kFp32));
    const Tensor projection = at::randn({n, 3});
    const auto got = test::gradients(op, inputs, projection);
    const auto expected = test::gradients(oracle, wide, projection);
    for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(test::close(got[i], expected[i], test::kFp32Grad));
  }
}

// An element's bits do not depend on its place.
TEST(SigmoidGate, ElementsAloneEqualTogether) {
  const Tensor x = at::randn({1000}), g = at::randn({1000}) * 4;
  const Tensor y = ops::sigmoid_gate(x, g);
  for (const int64_t i : {0, 7, 500, 999})
    EXPECT_TRUE(
        at::equal(ops::sigmoid_gate(x.slice(0, i, i + 1), g.slice(0, i, i + 1)), y.slice(0, i, i + 1)));
}

TEST(Glu, SaturatesAndPassesNan) {
  const Tensor far = at::tensor({-1e30f, 1e30f, -1000.0f, 1000.0f});
  const Tensor y = ops::glu(far, at::full({4}, 1e30f), 4, 25);
  EXPECT_TRUE(test::close(y, at::tensor({0.0f, 100.0f, 0.0f, 100.0f}), test::kFp32));
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Form f : kForms) {
    EXPECT_TRUE(
        at::isnan(ops::glu(at::full({17}, nan), at::ones({17}), f.beta_gate, f.beta_up)).all().item<bool>());
    EXPECT_TRUE(
        at::isnan(ops::glu(at::ones({17}), at::full({17}, nan), f.beta_gate, f.beta_up)).all().item<bool>());
  }
}

TEST(Glu, GradientMatchesFiniteDifference) {
  at::manual_seed(2);
  const auto options = at::TensorOptions().dtype(at::kDouble);
  for (const Form f : kForms) {
    EXPECT_TRUE(test::matches_finite_difference(
        oracle_of(f), {at::randn({5, 4}, options), at::randn({5, 4}, options)}, at::randn({5, 4}, options)));
  }
}

TEST(Glu, Bf16RoundsOnce) {
  at::manual_seed(3);
  const Tensor g = at::randn({33, 7}).to(at::kBFloat16), u = at::randn({33, 7}).to(at::kBFloat16);
  EXPECT_TRUE(test::bit_equal(ops::glu(g, u, 4, 25),
                              ops::glu(g.to(at::kFloat), u.to(at::kFloat), 4, 25).to(at::kBFloat16)));
}

TEST(Glu, RefusesBadArguments) {
  EXPECT_THROW(ops::glu(at::ones({3}), at::ones({4}), 4, 25), c10::Error);
  EXPECT_THROW(ops::glu(at::ones({3}), at::ones({3}, at::kDouble), 4, 25), c10::Error);
  EXPECT_THROW(ops::glu(at::ones({3}), at::ones({3}), -1, 25), c10::Error);
}

}  // namespace
}  // namespace godwit
