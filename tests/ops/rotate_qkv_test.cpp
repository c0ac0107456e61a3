// rotate_qkv: the composition against the formula, the kernels against the composition in fp64. The second
// part is skipped where there is no GPU.
#include "godwit/ops/rotate_qkv.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "godwit/ops/flash_packed.h"
#include "godwit/ops/ops.h"
#include "tests/support/compare.h"
#include "tests/support/gradients.h"
#include "tests/support/limits.h"

namespace godwit {
namespace {

using at::Tensor;

Tensor turns_of(const Tensor& angle) {
  return at::stack({at::cos(angle), at::sin(angle)}, -1);
}

TEST(RotateQkv, TurnsPairsOfNeighbours) {
  at::manual_seed(4);
  for (const int64_t P : {0, 1, 15, 17, 65}) {
    const Tensor qkv = at::randn({P, 3, 2, 6}), angle = at::randn({P, 3});
    const auto [q, k, v] = ops::rotate_qkv(qkv, turns_of(angle));
    const Tensor cos = at::cos(angle).unsqueeze(1), sin = at::sin(angle).unsqueeze(1);  // a head each
    for (const auto& [got, part] : {std::pair(q, 0), std::pair(k, 1)}) {
      const Tensor a = qkv.select(1, part).slice(-1, 0, 6, 2), b = qkv.select(1, part).slice(-1, 1, 6, 2);
      EXPECT_TRUE(test::close(got.slice(-1, 0, 6, 2), a * cos - b * sin, test::kFp32));
      EXPECT_TRUE(test::close(got.slice(-1, 1, 6, 2), a * sin + b * cos, test::kFp32));
    }
    EXPECT_TRUE(at::equal(v, qkv.select(1, 2)));
  }
}

TEST(RotateQkv, RefusesOtherShapes) {
  const Tensor qkv = at::randn({5, 3, 2, 8});
  EXPECT_THROW(ops::rotate_qkv(qkv, at::randn({5, 3, 2})), c10::Error);
  EXPECT_THROW(ops::rotate_qkv(qkv, at::randn({5, 4, 2}, at::kDouble)), c10::Error);
  EXPECT_THROW(ops::rotate_qkv(at::randn({5, 2, 2, 8}), at::randn({5, 4, 2})), c10::Error);
}

class RotateCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no GPU";
    at::manual_seed(5);
  }
};

TEST_F(RotateCuda, ForwardAndBackward) {
  for (const auto& [P, H, d] : {std::tuple(1, 1, 8), std::tuple(257, 12, 128), std::tuple(64, 4, 72)}) {
    const Tensor qkv = at::randn({P, 3, H, d}).to(at::kBFloat16);
    const Tensor turns = turns_of(at::randn({P, d / 2}));
    const Tensor on_gpu = qkv.to(at::kCUDA).requires_grad_(true);
    const Tensor exact = qkv.to(at::kDouble).requires_grad_(true);
    const auto [q, k, v] = ops::rotate_qkv(on_gpu, turns.to(at::kCUDA));
    const auto [eq, ek, ev] = ops::rotate_qkv(exact, turns.to(at::kDouble));
    const Tensor got = at::stack({q, k, v}), want = at::stack({eq, ek, ev});
    EXPECT_TRUE(test::close_norm(got, want, test::kBf16Chain));
    const Tensor grad = at::randn_like(want).to(at::kBFloat16);
    const auto d_got = torch::autograd::grad({got}, {on_gpu}, {grad.to(at::kCUDA)});
    const auto d_want = torch::autograd::grad({want}, {exact}, {grad.to(at::kDouble)});
    EXPECT_TRUE(test::close_norm(d_got[0], d_want[0], test::kBf16Chain));
  }
}

// Causal attention over many sequences as one call, beside each of them in fp64.
TEST_F(RotateCuda, PackedFlashAttention) {
  const Tensor cu = at::tensor({0, 1, 1, 17, 80, 81, 338}, at::kLong);
  for (const bool causal : {true, false}) {
    std::vector<Tensor> gpu, exact;
    for (int i = 0; i < 3; ++i) {
      const Tensor x = at::randn({338, 3, 64}).to(at::kBFloat16);
      gpu.push_back(x.to(at::kCUDA).requires_grad_(true));
      exact.push_back(x.to(at::kDouble).requires_grad_(true));
    }
    ASSERT_TRUE(ops::takes_flash_packed(gpu[0], gpu[2]));
    const Tensor got = ops::flash_packed(gpu[0], gpu[1], gpu[2], cu, cu, {.scale = 0.125, .causal = causal});
    std::vector<Tensor> rows;
    for (int64_t n = 0; n + 1 < cu.numel(); ++n) {
      const int64_t begin = cu[n].item<int64_t>(), count = cu[n + 1].item<int64_t>() - begin;
      if (count == 0) continue;
      const auto heads = [&](const Tensor& x) { return x.narrow(0, begin, count).transpose(0, 1); };
      rows.push_back(at::scaled_dot_product_attention(heads(exact[0]), heads(exact[1]), heads(exact[2]), {},
                                                      0.0, causal, 0.125)
                         .transpose(0, 1));
    }
    const Tensor want = at::cat(rows);
    EXPECT_TRUE(test::close_norm(got, want, test::kBf16Chain));
    const Tensor grad = at::randn_like(want).to(at::kBFloat16);
    const auto d_got = torch::autograd::grad({got}, gpu, {grad.to(at::kCUDA)});
    const auto d_want = torch::autograd::grad({want}, exact, {grad.to(at::kDouble)});
    for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(test::close_norm(d_got[i], d_want[i], test::kBf16Grad)) << i;
  }
}

}  // namespace
}  // namespace godwit
