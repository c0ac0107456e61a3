// moe_experts against a loop over tokens in fp64.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
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

// Widths that fill no vector, no panel, and exactly some.
TEST(MoeExperts, Widths) {
  for (const auto& [width, inner] :
       {std::pair<int64_t, int64_t>{1, 1}, {5, 3}, {16, 16}, {33, 17}, {64, 32}, {96, 48}}) {
    SCOPED_TRACE(width);
    check_batch(make_batch(37, 4, 2, width, inner, Load::kRandom));
  }
}

// Several blocks of rows and several parts of one expert.
TEST(MoeExperts, ManyRowsOfOneExpert) {
  for (const int64_t tokens : {257, 2049, 4500}) {
    SCOPED_TRACE(tokens);
    const Batch b = make_batch(tokens, 3, 1, 16, 8, Load::kOneExpert);
    const auto wide = test::to_double(b.inputs);
    const auto oracle = [&](const auto& x) {
      return ops::ref::moe_experts(x[0], b.experts, x[1], x[2], x[3], x[4], kBetaGate, kBetaUp);
    };
    EXPECT_TRUE(test::close(op_on(b.experts)(b.inputs), oracle(wide), test::kFp32));
    const Tensor projection = at::randn(b.inputs[0].sizes());
    const auto got = test::gradients(op_on(b.experts), b.inputs, projection);
    const auto expected = test::gradients(oracle, wide, projection);
    for (size_t i = 0; i < got.size(); ++i)
      EXPECT_TRUE(test::close(got[i], expected[i], test::kFp32Grad)) << "input " << i;
  }
}

// Bit for bit: a token's result does not depend on the tokens beside it, so neither on how many rows its
// experts have (one row: the decode form; many: tiles).
TEST(MoeExperts, TokensBesideDoNotMatter) {
  for (const auto& [width, inner] : {std::pair<int64_t, int64_t>{64, 32}, {33, 17}}) {
    const Batch b = make_batch(257, 12, 3, width, inner, Load::kRandom);
    const auto run = [&](int64_t from, int64_t n) {
      auto part = b.inputs;
      for (size_t i = 0; i < 2; ++i) part[i] = part[i].narrow(0, from, n);
      return op_on(b.experts.narrow(0, from, n))(part);
    };
    const Tensor whole = run(0, 257);
    for (const int64_t n : {1, 2, 5, 16, 40})
      EXPECT_TRUE(test::bit_equal(run(100, n), whole.narrow(0, 100, n))) << n;
  }
}

TEST(MoeExperts, ThreadsDoNotMatter) {
  const Batch b = make_batch(3000, 6, 2, 32, 16, Load::kFewExperts);
  const Tensor projection = at::randn(b.inputs[0].sizes());
  const int threads = at::get_num_threads();
  const auto run = [&](int n) {
    at::set_num_threads(n);
    auto out = test::gradients(op_on(b.experts), b.inputs, projection);
    out.push_back(op_on(b.experts)(b.inputs));
    at::set_num_threads(threads);
    return out;
  };
  const auto single = run(1), several = run(3);
  for (size_t i = 0; i < single.size(); ++i) EXPECT_TRUE(test::bit_equal(single[i], several[i])) << i;
}

// What the forward keeps for the backward is what the backward would compute.
TEST(MoeExperts, KeptEqualsRecomputed) {
  const Batch b = make_batch(65, 12, 3, 48, 24, Load::kRandom);
  const auto fwd = c10::Dispatcher::singleton().findSchemaOrThrow("godwit::moe_experts_fwd", "");
  const auto bwd = c10::Dispatcher::singleton().findSchemaOrThrow("godwit::moe_experts_bwd", "");
  const auto gradients = [&](bool keep) {
    torch::jit::Stack stack;
    torch::jit::push(stack, b.inputs[0], b.experts, b.inputs[1], b.inputs[2], b.inputs[3], b.inputs[4],
                     kBetaGate, kBetaUp, keep);
    fwd.callBoxed(stack);
    const Tensor saved = stack[1].toTensor();
    stack.clear();
    torch::jit::push(stack, b.inputs[0], saved, b.inputs[0], b.experts, b.inputs[1], b.inputs[2], b.inputs[3],
                     b.inputs[4], kBetaGate, kBetaUp, c10::List<bool>({true, true, true}));
    bwd.callBoxed(stack);
    return stack;
  };
  const auto kept = gradients(true), again = gradients(false);
  for (size_t i = 0; i < kept.size(); ++i)
    EXPECT_TRUE(test::bit_equal(kept[i].toTensor(), again[i].toTensor())) << i;
}

// Experts that no token chose are not touched: their weights may hold anything, their gradients are zero.
TEST(MoeExperts, UnusedExpertsAreNotRead) {
  const Batch clean = make_batch(40, 9, 1, 16, 8, Load::kFewExperts);
  Batch b = clean;
  for (size_t i = 2; i < 5; ++i) {
    b.inputs[i] = b.inputs[i].clone();
    b.inputs[i].narrow(0, 2, 7).fill_(std::numeric_limits<float>::quiet_NaN());
  }
  const Tensor projection = at::randn({40, 16});
  const auto op = op_on(b.experts);
  EXPECT_TRUE(test::bit_equal(op(b.inputs), op(clean.inputs)));
  const auto got = test::gradients(op, b.inputs, projection),
             expected = test::gradients(op, clean.inputs, projection);
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(test::bit_equal(got[i], expected[i])) << i;
  EXPECT_EQ(got[2].narrow(0, 2, 7).abs().max().item<float>(), 0.0f);
}

TEST(MoeExperts, Bf16) {
  const Batch b = make_batch(33, 6, 2, 32, 16, Load::kRandom);
  std::vector<Tensor> rounded;
  for (const Tensor& x : b.inputs) rounded.push_back(x.to(at::kBFloat16));
  const Tensor y = op_on(b.experts)(rounded);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(test::close(y, by_token(b.experts)(test::to_double(rounded)), test::kBf16));
  const Tensor projection = at::randn({33, 32});
  const auto got = test::gradients(op_on(b.experts), rounded, projection);
  const auto expected = test::gradients(by_token(b.experts), test::to_double(rounded), projection);
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(test::close(got[i], expected[i], test::kBf16)) << i;
}

TEST(MoeExperts, RefusesBadArguments) {
  const Batch b = make_batch(5, 4, 2, 8, 4, Load::kRandom);
  const auto& x = b.inputs;
  Tensor outside = b.experts.clone();
  outside[3][1] = 4;
  EXPECT_THROW(op_on(outside)(x), c10::Error);
  EXPECT_THROW(op_on(b.experts.to(at::kLong))(x), c10::Error);
  EXPECT_THROW(op_on(b.experts)({x[0], x[1], x[2], x[4], x[3]}), c10::Error);
  EXPECT_THROW(op_on(b.experts.narrow(0, 0, 4))(x), c10::Error);
}

TEST(MoeExperts, GradientMatchesFiniteDifference) {
  const Batch b = make_batch(7, 5, 2, 6, 4, Load::kRandom);
  EXPECT_TRUE(test::matches_finite_difference(op_on(b.experts), test::to_double(b.inputs),
                                              at::randn({7, 6}, at::kDouble)));
}

}  // namespace
}  // namespace godwit
