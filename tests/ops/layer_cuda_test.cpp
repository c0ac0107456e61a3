// The router, AttnRes, GLU, norm and loss ops on a GPU, outputs and gradients, against the same op in fp64 on
// the CPU, which takes its plain composition. Inputs are exact in bf16. Skipped where there is no GPU.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <functional>

#include "godwit/ops/ops.h"
#include "tests/support/compare.h"
#include "tests/support/limits.h"

namespace godwit::test {
namespace {

using at::Tensor;
using torch::autograd::variable_list;

class LayerCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no GPU";
    at::manual_seed(3);
  }
};

Tensor values(at::IntArrayRef sizes, double size = 1) {
  return (at::randn(sizes) * size).to(at::kBFloat16);
}

// f on bf16 tensors on the GPU (those listed in `full` in fp32) and on the same values in fp64: the output
// and all gradients.
void expect_match(const variable_list& inputs, const std::function<Tensor(const variable_list&)>& f,
                  const std::vector<size_t>& full = {}) {
  variable_list gpu, exact;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool wide = std::find(full.begin(), full.end(), i) != full.end();
    gpu.push_back(inputs[i].to(at::kCUDA, wide ? at::kFloat : at::kBFloat16).requires_grad_(true));
    exact.push_back(inputs[i].to(at::kDouble).requires_grad_(true));
  }
  const Tensor got = f(gpu), want = f(exact);
  EXPECT_EQ(got.scalar_type(), gpu[0].scalar_type());
  EXPECT_TRUE(close_norm(got, want, kBf16Chain));
  const Tensor grad = values(want.sizes());
  const auto d_got = torch::autograd::grad({got}, gpu, {grad.to(got.device(), got.scalar_type())});
  const auto d_want = torch::autograd::grad({want}, exact, {grad.to(at::kDouble)});
  for (size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_EQ(d_got[i].scalar_type(), gpu[i].scalar_type());
    EXPECT_TRUE(close_norm(d_got[i], d_want[i], kBf16Chain)) << "input " << i;
  }
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(bit_equal(f(gpu), got));
}

TEST_F(LayerCuda, Mix) {
  for (const int64_t S : {2, 5, 9, 11}) {  // eleven take the composition
    for (const int64_t D : {256, 20, 2304}) {
      variable_list inputs;
      for (int64_t s = 0; s < S; ++s) inputs.push_back(values({37, D}));
      inputs.push_back(values({D}, 0.3) + 1);
      inputs.push_back(values({D}, 0.1));
      const auto mix = [&](const variable_list& x) {
        return ops::attn_res_mix({x.begin(), x.begin() + S}, x[S], x[S + 1], 1e-5);
      };
      expect_match(inputs, mix);
      expect_match(inputs, mix, {size_t(S), size_t(S) + 1});
    }
  }
}

TEST_F(LayerCuda, Glu) {
  for (const auto& [gate, up] : {std::pair(4.0, 25.0), std::pair(0.0, 0.0)})
    for (const int64_t D : {64, 7}) {
      expect_match({values({33, D}, 3), values({33, D}, 3)},
                   [&](const variable_list& x) { return ops::glu(x[0], x[1], gate, up); });
    }
}

TEST_F(LayerCuda, Norms) {
  for (const int64_t D : {128, 512, 1536, 7168, 20}) {
    const Tensor weight = values({D}, 0.3) + 1;
    const auto norm = [](const variable_list& x) { return ops::rms_norm(x[0], x[1], 1e-5); };
    expect_match({values({33, D}), weight}, norm);
    expect_match({values({33, D}), weight}, norm, {1});
    expect_match({values({3, 11, D}), values({3, 11, D}), weight},
                 [](const variable_list& x) { return ops::rms_norm_gated(x[0], x[1], x[2], 1e-5); }, {2});
    // Rows apart, as the latent part of a projection has them.
    expect_match({values({33, D + 64}), weight},
                 [&](const variable_list& x) { return ops::rms_norm(x[0].narrow(1, 0, D), x[1], 1e-6); });
  }
}

TEST_F(LayerCuda, Router) {
  for (const int64_t groups : {1, 8}) {
    const Tensor logits = at::randn({77, 896}) * 1.5, bias = at::randn({896}) * 0.05;
    Tensor x = logits.to(at::kCUDA).requires_grad_(true), y = logits.clone().requires_grad_(true);
    const auto got = ops::moe_router(x, bias.to(at::kCUDA), 16, true, 1.5, groups, 4);
    const auto want = ops::moe_router(y, bias, 16, true, 1.5, groups, 4);
    EXPECT_TRUE(bit_equal(std::get<1>(got).cpu(), std::get<1>(want)));
    EXPECT_TRUE(close(std::get<0>(got), std::get<0>(want), kFp32));
    EXPECT_TRUE(close(std::get<2>(got), std::get<2>(want), kFp32));
    EXPECT_TRUE(close(std::get<3>(got), std::get<3>(want), kFp32));
    const Tensor grad = at::randn({77, 16});
    const auto dx = torch::autograd::grad({std::get<0>(got)}, {x}, {grad.to(at::kCUDA)}),
               dy = torch::autograd::grad({std::get<0>(want)}, {y}, {grad});
    EXPECT_TRUE(close(dx[0], dy[0], kFp32Grad));
    Tensor counts = at::ones({896, 1000}, at::TensorOptions(at::kLong).device(at::kCUDA)),
           expected = at::ones({896, 1000}, at::kLong);
    ops::qb_histogram(std::get<2>(got), std::get<3>(got), -1.1, 1.1, counts);
    ops::qb_histogram(std::get<2>(got).cpu(), std::get<3>(got).cpu(), -1.1, 1.1, expected);
    EXPECT_EQ(counts.sum().item<int64_t>(), 896 * (1000 + 77));
    // A value that rounding carries over a bin's edge moves by one bin.
    EXPECT_LE((counts.cpu() - expected).abs().sum().item<int64_t>(), 20);
  }
}

TEST_F(LayerCuda, CrossEntropy) {
  for (const int64_t V : {1000, 1003}) {
    const int64_t T = 70, D = 64;
    const Tensor x = values({T, D}), head = values({V, D}, 0.3), weights = at::rand({T});
    Tensor targets = at::randint(V, {T}, at::kLong);
    targets[3] = -100;
    const auto run = [&](at::Device device, at::ScalarType type) {
      const Tensor a = x.to(device, type).requires_grad_(true),
                   b = head.to(device, type).requires_grad_(true);
      const auto [loss, nll] = ops::linear_cross_entropy(
          a, b, targets.to(device), weights.to(device, type == at::kDouble ? type : at::kFloat));
      auto grads = torch::autograd::grad({loss}, {a, b});
      grads.push_back(loss.detach()), grads.push_back(nll);
      return grads;
    };
    const auto got = run(at::kCUDA, at::kBFloat16), want = run(at::kCPU, at::kDouble);
    for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(close_norm(got[i], want[i], kBf16Chain)) << i;
  }
}

// bf16 sums leave the singular values where fp32 leaves them, to a few roundings.
TEST_F(LayerCuda, NewtonSchulz) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>(96, 160), {160, 96}, {128, 128}}) {
    const Tensor m = at::randn({5, rows, cols});
    Tensor got = m.to(at::kCUDA), want = m.to(at::kDouble);
    ops::newton_schulz_(got, 5);
    ops::newton_schulz_(want, 5);
    EXPECT_EQ(got.scalar_type(), at::kFloat);
    EXPECT_TRUE(close_norm(got, want, 0.05));
    const Tensor s = at::linalg_svdvals(got.cpu());
    EXPECT_LT(s.max().item<float>(), 1.3F);
    EXPECT_GT(s[0][s.size(1) / 2].item<float>(), 0.6F);
  }
}

// Where symmetric products are computed by blocks up to the diagonal.
TEST_F(LayerCuda, NewtonSchulzOfLargeMatrices) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>(2048, 2304), {2304, 2048}}) {
    const Tensor m = at::randn({2, rows, cols}, at::TensorOptions(at::kDouble).device(at::kCUDA));
    Tensor got = m.to(at::kBFloat16), again = got.clone();
    Tensor x = got.to(at::kDouble);
    x = x / at::linalg_vector_norm(x, 2, {1, 2}, /*keepdim=*/true);
    for (int i = 0; i < 5; ++i) {
      const Tensor a = rows > cols ? at::bmm(x.mT(), x) : at::bmm(x, x.mT());
      const Tensor p = -4.7750 * a + 2.0315 * at::bmm(a, a);
      x = 3.4445 * x + (rows > cols ? at::bmm(x, p) : at::bmm(p, x));
    }
    ops::newton_schulz_(got, 5);
    ops::newton_schulz_(again, 5);
    EXPECT_TRUE(close_norm(got, x, 0.05));
    EXPECT_TRUE(bit_equal(got, again));
  }
}

}  // namespace
}  // namespace godwit::test
