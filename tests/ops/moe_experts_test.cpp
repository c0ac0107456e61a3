// moe_experts against a loop over tokens in fp64.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "godwit/ops/ops.h"
#include "godwit/ops/ref/glu_ref.h"
#include "godwit/ops/ref/moe_experts_ref.h"
#include "tests/support/gradients.h"

namespace godwit {
namespace {

using at::Tensor;

constexpr double kBetaGate = 4, kBetaUp = 25;

struct Batch {
  std::vector<Tensor> inputs;  // z, weights, w1, w3, w2
  Tensor experts;
};

enum class Load { kRandom, kOneExpert, kFewExperts };

Batch make_batch(int64_t tokens, int64_t experts, int64_t k, int64_t width, int64_t inner, Load load) {
  at::manual_seed(1);
  Tensor chosen = at::rand({tokens, experts}).argsort(/*dim=*/-1, /*descending=*/false).narrow(1, 0, k);
  if (load == Load::kOneExpert) chosen = at::full({tokens, k}, experts - 1, at::kLong);
  if (load == Load::kFewExperts) chosen = chosen.remainder(2);
  return {{at::randn({tokens, width}), at::rand({tokens, k}), at::randn({experts, inner, width}) * 0.3,
           at::randn({experts, inner, width}) * 0.3, at::randn({experts, width, inner}) * 0.3},
          chosen.to(at::kInt)};
}

test::TensorFn op_on(const Tensor& experts) {
  return [experts](const auto& x) {
    return ops::moe_experts(x[0], experts, x[1], x[2], x[3], x[4], kBetaGate, kBetaUp);
  };
}

// u_t = sum_i p_ti W2_e glu(W1_e z_t, W3_e z_t), one token and slot at a time.
test::TensorFn by_token(const Tensor& experts) {
  return [experts](const auto& x) {
    std::vector<Tensor> rows;
    for (int64_t t = 0; t < x[0].size(0); ++t) {
      Tensor u = at::zeros({x[0].size(1)}, x[0].options());
      for (int64_t i = 0; i < experts.size(1); ++i) {
        const auto e = experts[t][i].template item<int64_t>();
        const Tensor inner =
            ops::ref::glu(at::mv(x[2][e], x[0][t]), at::mv(x[3][e], x[0][t]), kBetaGate, kBetaUp);
        u = u + x[1][t][i] * at::mv(x[4][e], inner);
      }
      rows.push_back(u);
    }
    return rows.empty() ? x[0] * 0 : at::stack(rows);
  };
}

void check_batch(const Batch& b) {
  const auto wide = test::to_double(b.inputs);
  const auto op = op_on(b.experts), oracle = by_token(b.experts);
  EXPECT_TRUE(test::close(op(b.inputs), oracle(wide), test::kFp32));
  EXPECT_TRUE(test::close(op(wide), oracle(wide), test::kFp64));
  const Tensor projection = at::randn(b.inputs[0].sizes());
  const auto got = test::gradients(op, b.inputs, projection);
  const auto expected = test::gradients(oracle, wide, projection);
  for (size_t i = 0; i < got.size(); ++i)
    EXPECT_TRUE(test::close(got[i], expected[i], test::kFp32Grad)) << "input " << i;
}

TEST(MoeExperts, MatchesOracle) {
  for (const int64_t tokens : {0, 1, 15, 16, 17, 63, 64, 65}) {
    SCOPED_TRACE(tokens);
    check_batch(make_batch(tokens, 12, 3, 16, 8, Load::kRandom));
  }
}

TEST(MoeExperts, UnevenLoads) {
  check_batch(make_batch(65, 9, 1, 16, 8, Load::kOneExpert));
  check_batch(make_batch(40, 9, 1, 16, 8, Load::kFewExperts));
  check_batch(make_batch(33, 5, 5, 16, 8, Load::kRandom));  // k = E
}

TEST(MoeExperts, GradientMatchesFiniteDifference) {
  const Batch b = make_batch(7, 5, 2, 6, 4, Load::kRandom);
  EXPECT_TRUE(test::matches_finite_difference(op_on(b.experts), test::to_double(b.inputs),
                                              at::randn({7, 6}, at::kDouble)));
}

}  // namespace
}  // namespace godwit
