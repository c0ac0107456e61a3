// attn_res_mix against its fp64 composition, and what the paper promises of it.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "godwit/ops/ops.h"
#include "godwit/ops/ref/attn_res_mix_ref.h"
#include "tests/support/gradients.h"

namespace godwit {
namespace {

using at::Tensor;

constexpr double kEps = 1e-5;

// Sources first, then norm_weight and query.
test::TensorFn op() {
  return [](const std::vector<Tensor>& x) {
    return ops::attn_res_mix({x.begin(), x.end() - 2}, x[x.size() - 2], x.back(), kEps);
  };
}
test::TensorFn oracle() {
  return [](const std::vector<Tensor>& x) {
    const std::vector<Tensor> sources(x.begin(), x.end() - 2);
    return ops::ref::attn_res_mix(sources, x[x.size() - 2], x.back(), kEps);
  };
}

std::vector<Tensor> make_inputs(int64_t sources, int64_t tokens, int64_t width) {
  at::manual_seed(1);
  std::vector<Tensor> inputs;
  for (int64_t s = 0; s < sources; ++s)
    inputs.push_back(at::randn({tokens, width}) * (0.5 + static_cast<double>(s)));
  inputs.push_back(at::rand({width}) + 0.5);
  inputs.push_back(at::randn({width}) * 0.3);
  return inputs;
}

TEST(AttnResMix, MatchesOracle) {
  for (const int64_t sources : {1, 2, 5, 9, 17}) {
    for (const int64_t tokens : {0, 1, 15, 16, 17, 63, 64, 65, 257}) {
      const auto inputs = make_inputs(sources, tokens, sources % 2 == 0 ? 64 : 37);
      const auto wide = test::to_double(inputs);
      EXPECT_TRUE(test::close(op()(inputs), oracle()(wide), test::kFp32));
      const Tensor projection = at::randn(inputs[0].sizes());
      const auto got = test::gradients(op(), inputs, projection);
      const auto expected = test::gradients(oracle(), wide, projection);
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_TRUE(test::close(got[i], expected[i], test::kFp32Grad))
            << "S " << sources << ", T " << tokens << ", input " << i;
      }
    }
  }
}

TEST(AttnResMix, GradientMatchesFiniteDifference) {
  const auto inputs = test::to_double(make_inputs(3, 4, 6));
  EXPECT_TRUE(test::matches_finite_difference(oracle(), inputs, at::randn({4, 6}, at::kDouble)));
}

// Zero queries give the mean of the sources, not their sum (arXiv 2603.15031, initialisation).
TEST(AttnResMix, ZeroQueryIsTheMean) {
  auto inputs = make_inputs(5, 33, 48);
  inputs.back().zero_();
  const Tensor mean =
      at::stack(std::vector<Tensor>(inputs.begin(), inputs.end() - 2)).to(at::kDouble).mean(0);
  EXPECT_TRUE(test::close(op()(inputs), mean, test::kFp32));
}

TEST(AttnResMix, OneSourceIsItself) {
  const auto inputs = make_inputs(1, 20, 31);
  EXPECT_TRUE(test::bit_equal(op()(inputs), inputs[0]));
}

// Large scores: the softmax must not overflow.
TEST(AttnResMix, LargeQuery) {
  auto inputs = make_inputs(4, 9, 32);
  inputs.back().mul_(1000);
  EXPECT_TRUE(test::close(op()(inputs), oracle()(test::to_double(inputs)), test::kFp32Chain));
}

TEST(AttnResMix, TokensAndThreadsDoNotMatter) {
  const auto inputs = make_inputs(5, 257, 48);
  const Tensor projection = at::randn(inputs[0].sizes());
  const auto narrowed = [&](int64_t from, int64_t n) {
    auto part = inputs;
    for (size_t i = 0; i + 2 < part.size(); ++i) part[i] = part[i].narrow(0, from, n);
    return part;
  };
  const Tensor whole = op()(inputs);
  for (const auto& [from, n] : {std::pair<int64_t, int64_t>{0, 1}, {100, 17}, {256, 1}}) {
    EXPECT_TRUE(test::bit_equal(op()(narrowed(from, n)), whole.narrow(0, from, n)));
  }
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const auto single = test::gradients(op(), inputs, projection);
  at::set_num_threads(3);
  const auto several = test::gradients(op(), inputs, projection);
  at::set_num_threads(threads);
  for (size_t i = 0; i < single.size(); ++i)
    EXPECT_TRUE(test::bit_equal(single[i], several[i])) << "input " << i;
}

TEST(AttnResMix, Bf16) {
  auto inputs = make_inputs(4, 17, 32);
  for (Tensor& x : inputs) x = x.to(at::kBFloat16);
  const Tensor y = op()(inputs);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(test::close(y, oracle()(test::to_double(inputs)), test::kBf16));
}

TEST(AttnResMix, RefusesBadArguments) {
  const Tensor v = at::ones({3, 8}), w = at::ones({8});
  EXPECT_THROW(ops::attn_res_mix({}, w, w, kEps), c10::Error);
  EXPECT_THROW(ops::attn_res_mix({v, at::ones({4, 8})}, w, w, kEps), c10::Error);
  EXPECT_THROW(ops::attn_res_mix({v}, at::ones({7}), w, kEps), c10::Error);
}

}  // namespace
}  // namespace godwit
