// moe_experts on a GPU against the fp64 composition on the CPU, with inputs that are exact in bf16. Skipped
// where there is no GPU.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "godwit/ops/linear_each.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/moe_experts_ref.h"
#include "godwit/ops/ref/quantized_ref.h"
#include "tests/support/compare.h"

namespace godwit::test {
namespace {

using at::Tensor;

class MoeExpertsCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no GPU";
  }
};

struct Shape {
  int64_t tokens, k, experts, width, inner;
};

struct Arguments {
  std::vector<Tensor> leaves;  // z, weights, w1, w3, w2
  Tensor experts;
};

// Distinct experts a token; expert 0 takes every token, the last none.
Arguments draw(const Shape& s) {
  const auto bf16 = [](const Tensor& x) { return x.to(at::kBFloat16).to(at::kDouble); };
  const Tensor scores = at::rand({s.tokens, s.experts});
  if (s.tokens > 0) scores.select(1, 0).fill_(2), scores.select(1, s.experts - 1).fill_(-1);
  const double scale = 1.0 / std::sqrt(static_cast<double>(s.width));
  return {.leaves = {bf16(at::randn({s.tokens, s.width})), at::rand({s.tokens, s.k}).to(at::kDouble),
                     bf16(at::randn({s.experts, s.inner, s.width}) * scale),
                     bf16(at::randn({s.experts, s.inner, s.width}) * scale),
                     bf16(at::randn({s.experts, s.width, s.inner}) * scale)},
          .experts = std::get<1>(scores.topk(s.k, 1)).to(at::kInt)};
}

Arguments on_gpu(const Arguments& x, at::ScalarType type) {
  Arguments y{.leaves = x.leaves, .experts = x.experts.to(at::kCUDA)};
  for (size_t i = 0; i < y.leaves.size(); ++i)
    y.leaves[i] = y.leaves[i].to(at::kCUDA, i == 1 ? at::kFloat : type);
  return y;
}

using Op = decltype(ops::ref::moe_experts);

// The output, then the gradients of z, weights, w1, w3, w2.
std::vector<Tensor> run(const Arguments& x, double beta_gate, double beta_up, Op op) {
  std::vector<Tensor> leaves = x.leaves;
  for (Tensor& t : leaves) t = t.detach().requires_grad_(true);
  const Tensor out = op(leaves[0], x.experts, leaves[1], leaves[2], leaves[3], leaves[4], beta_gate, beta_up);
  at::manual_seed(7);
  const Tensor d_out = at::randn(out.sizes()).to(at::kBFloat16).to(out.device(), out.scalar_type());
  std::vector<Tensor> all = torch::autograd::grad({out}, leaves, {d_out});
  all.insert(all.begin(), out.detach());
  return all;
}

void expect_match(const Shape& s, at::ScalarType type, double beta_gate, double beta_up, double limit) {
  static const char* const kNames[] = {"out", "z", "weights", "w1", "w3", "w2"};
  const Arguments x = draw(s);
  const auto want = run(x, beta_gate, beta_up, ops::ref::moe_experts);
  const auto got = run(on_gpu(x, type), beta_gate, beta_up, ops::moe_experts);
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(close_norm(got[i], want[i], limit)) << kNames[i] << ", " << s.tokens << " tokens";
  }
}

TEST_F(MoeExpertsCuda, Bf16MatchesReference) {
  at::manual_seed(1);
  for (const int64_t tokens : {1, 15, 16, 17, 63, 64, 65, 257}) {
    expect_match({tokens, 3, 7, 128, 192}, at::kBFloat16, 4, 25, kBf16Chain);
  }
  expect_match({900, 4, 20, 72, 40}, at::kBFloat16, 0, 0, kBf16Chain);
  expect_match({500, 8, 40, 520, 264}, at::kBFloat16, 4, 0, kBf16Chain);
  expect_match({900, 2, 4, 512, 640}, at::kBFloat16, 4, 25, kBf16Chain);
}

// What the kernels do not take goes the plain way, on the GPU.
TEST_F(MoeExpertsCuda, OtherTypesAndWidths) {
  at::manual_seed(2);
  expect_match({40, 3, 7, 128, 192}, at::kFloat, 4, 25, kFp32Chain);
  expect_match({40, 3, 7, 20, 28}, at::kBFloat16, 4, 25, kBf16Chain);
}

TEST_F(MoeExpertsCuda, NoToken) {
  const auto got = run(on_gpu(draw({0, 2, 4, 128, 64}), at::kBFloat16), 4, 25, ops::moe_experts);
  EXPECT_EQ(got[0].numel(), 0);
  for (const size_t i : {3, 4, 5}) EXPECT_TRUE(got[i].eq(0).all().item<bool>());
}

// Twice, and any tokens alone: the same bits.
TEST_F(MoeExpertsCuda, SameBitsAgainAndAlone) {
  at::manual_seed(3);
  const Arguments x = on_gpu(draw({700, 4, 9, 256, 320}), at::kBFloat16);
  const auto all = run(x, 4, 25, ops::moe_experts), again = run(x, 4, 25, ops::moe_experts);
  for (size_t i = 0; i < all.size(); ++i) EXPECT_TRUE(bit_equal(again[i], all[i])) << i;
  const at::NoGradGuard no_grad;
  for (const auto& [from, count] :
       std::vector<std::pair<int64_t, int64_t>>{{0, 1}, {699, 1}, {100, 17}, {300, 400}}) {
    const auto cut = [&, from = from, count = count](const Tensor& t) { return t.narrow(0, from, count); };
    const Tensor alone = ops::moe_experts(cut(x.leaves[0]), cut(x.experts), cut(x.leaves[1]), x.leaves[2],
                                          x.leaves[3], x.leaves[4], 4, 25);
    EXPECT_TRUE(bit_equal(alone, cut(all[0]))) << count << " tokens from " << from;
  }
}

// Packed weights: MXFP4 in both kernels' widths, int8 in one.
TEST_F(MoeExpertsCuda, PackedWeights) {
  at::manual_seed(4);
  for (const int64_t width : {512, 96, 0}) {  // 0: int8
    const int64_t experts = 6, latent = width > 0 ? width : 80, inner = 2 * latent;
    const auto packed = [&](int64_t rows, int64_t cols) -> std::pair<Tensor, Tensor> {
      if (width > 0)
        return {at::randint(256, {experts, rows, cols / 2}, at::kByte),
                at::randint(118, 121, {experts, rows, cols / 32}, at::kByte)};
      const auto [values, scale] = ops::quantize_int8(at::randn({experts, rows, cols}) * 0.1);
      return {values, scale};
    };
    const auto [w1, s1] = packed(inner, latent);
    const auto [w3, s3] = packed(inner, latent);
    const auto [w2, s2] = packed(latent, inner);
    const auto plain = [](const Tensor& c, const Tensor& s) {
      return ops::ref::dequantize(c, s).to(at::kDouble);
    };
    const auto there = [](const Tensor& t) { return t.to(at::kCUDA); };
    const ops::QuantizedExperts w{there(w1), there(s1), there(w3), there(s3), there(w2), there(s2)};
    for (const int64_t tokens : {1, 17, 64, 300}) {
      const Arguments x = draw({tokens, 3, experts, latent, 8});
      const Tensor want = ops::ref::moe_experts(x.leaves[0], x.experts, x.leaves[1], plain(w1, s1),
                                                plain(w3, s3), plain(w2, s2), 4, 25);
      const Tensor got =
          ops::moe_experts_quantized(x.leaves[0].to(at::kCUDA, at::kBFloat16), there(x.experts),
                                     x.leaves[1].to(at::kCUDA, at::kFloat), w, 4, 25);
      EXPECT_TRUE(close_norm(got, want, kBf16Chain)) << tokens << " tokens, width " << width;
    }
  }
}

// Linear layers with int8 weights: few rows, many, and widths that no kernel takes.
TEST_F(MoeExpertsCuda, LinearInt8) {
  at::manual_seed(5);
  for (const auto& [in, out] : std::vector<std::pair<int64_t, int64_t>>{{768, 200}, {80, 17000}, {20, 12}}) {
    const auto [values, scale] = ops::quantize_int8(at::randn({out, in}));
    const Tensor w = ops::ref::dequantize_int8(values, scale).to(at::kDouble);
    for (const int64_t rows : {0, 1, 16, 33, 64, 65, 300}) {
      const Tensor x = at::randn({rows, in}).to(at::kBFloat16);
      const Tensor got = ops::linear_int8(x.to(at::kCUDA), values.to(at::kCUDA), scale.to(at::kCUDA));
      EXPECT_TRUE(close_norm(got, at::linear(x.to(at::kDouble), w), kBf16Chain)) << rows << " rows of " << in;
      // Beside another matrix in one call, packed and not.
      const at::NoGradGuard no_grad;
      const ops::Matrix packed(values.to(at::kCUDA), scale.to(at::kCUDA)),
          plain(w.to(at::kCUDA, at::kBFloat16));
      for (const ops::Matrix* m : {&packed, &plain}) {
        const std::vector<Tensor> both = ops::linear_each(x.to(at::kCUDA), {m, m});
        ASSERT_EQ(both.size(), 2u);
        EXPECT_TRUE(bit_equal(both[0], both[1]));
        EXPECT_TRUE(close_norm(both[0], at::linear(x.to(at::kDouble), w), kBf16Chain)) << rows << " of two";
      }
    }
  }
}

}  // namespace
}  // namespace godwit::test
