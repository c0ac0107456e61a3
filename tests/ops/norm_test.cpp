// RMS norm and its gated form against fp64, values and gradients.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "godwit/ops/ops.h"
#include "godwit/ops/ref/norm_ref.h"
#include "tests/support/compare.h"

namespace godwit::test {
namespace {

using at::Tensor;
constexpr double kEps = 1e-5;

struct Shape {
  std::vector<int64_t> sizes;
};
const std::vector<Shape> kShapes = {{{0, 8}},  {{1, 3}},        {{3, 5}},    {{17, 16}},  {{65, 128}},
                                    {{2, 37}}, {{257, 3, 128}}, {{4, 7168}}, {{600, 64}}, {{24}}};

std::vector<Tensor> norm_grads(const std::vector<Tensor>& values, at::ScalarType type, const Tensor& grad,
                               bool reference, Tensor* out) {
  std::vector<Tensor> in;
  for (const Tensor& v : values) in.push_back(v.to(type).detach().requires_grad_(true));
  if (in.size() == 2) {
    *out = reference ? ops::ref::rms_norm_ref(in[0], in[1], kEps) : ops::rms_norm(in[0], in[1], kEps);
  } else {
    *out = reference ? ops::ref::rms_norm_gated_ref(in[0], in[2], in[1], kEps)
                     : ops::rms_norm_gated(in[0], in[2], in[1], kEps);
  }
  return torch::autograd::grad({*out}, in, {grad.to(type)});
}

TEST(RmsNorm, ValuesAndGradientsMatchFp64) {
  for (const auto& [sizes] : kShapes) {
    for (const bool gated : {false, true}) {
      std::vector<Tensor> values = {at::randn(sizes) * 3, at::randn({sizes.back()})};
      if (gated) values.push_back(at::randn(sizes) * 2);
      const Tensor grad = at::randn(sizes);
      Tensor y, expected_y;
      const auto got = norm_grads(values, at::kFloat, grad, false, &y);
      const auto expected = norm_grads(values, at::kDouble, grad, true, &expected_y);
      EXPECT_TRUE(close(y, expected_y, kFp32)) << at::IntArrayRef(sizes) << " gated " << gated;
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_TRUE(close(got[i], expected[i], kFp32Grad))
            << "input " << i << " of " << at::IntArrayRef(sizes) << " gated " << gated;
      }
    }
  }
}

TEST(RmsNorm, ReferenceMatchesFiniteDifferences) {
  const Tensor x = at::randn({3, 6}, at::kDouble), w = at::randn({6}, at::kDouble);
  const Tensor gate = at::randn({3, 6}, at::kDouble), grad = at::randn({3, 6}, at::kDouble);
  Tensor y;
  const std::vector<Tensor> values = {x, w, gate};
  const auto grads = norm_grads(values, at::kDouble, grad, true, &y);
  for (size_t i = 0; i < values.size(); ++i) {
    const Tensor d = at::randn_like(values[i]);
    const auto value = [&](double h) {
      std::vector<Tensor> moved = values;
      moved[i] = moved[i] + d * h;
      return (ops::ref::rms_norm_gated_ref(moved[0], moved[2], moved[1], kEps) * grad).sum().item<double>();
    };
    const double numeric = (value(1e-6) - value(-1e-6)) / 2e-6;
    const double scale = (grads[i].abs() * d.abs()).sum().item<double>();
    EXPECT_NEAR(numeric, (grads[i] * d).sum().item<double>(), kFiniteDiff * scale) << "input " << i;
  }
}

TEST(RmsNorm, RowsDoNotDependOnTheirNumberNorOnThreads) {
  const std::vector<Tensor> values = {at::randn({300, 128}), at::randn({128}), at::randn({300, 128})};
  const Tensor grad = at::randn({300, 128});
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  Tensor y1, y3;
  const auto one = norm_grads(values, at::kFloat, grad, false, &y1);
  at::set_num_threads(3);
  const auto three = norm_grads(values, at::kFloat, grad, false, &y3);
  at::set_num_threads(before);
  EXPECT_TRUE(bit_equal(y3, y1));
  for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(bit_equal(three[i], one[i])) << "input " << i;
  for (const int64_t row : {0, 1, 299}) {
    const auto part =
        ops::rms_norm_gated(values[0].narrow(0, row, 1), values[2].narrow(0, row, 1), values[1], kEps);
    EXPECT_TRUE(bit_equal(part, y1.narrow(0, row, 1))) << "row " << row;
  }
}

TEST(RmsNorm, ExtremeRows) {
  Tensor x = at::randn({6, 40});
  x[0].zero_();
  x[1].mul_(1e-12);
  x[2].mul_(1e15);
  const Tensor w = at::randn({40}), gate = at::randn({6, 40}) * 200;
  EXPECT_TRUE(close(ops::rms_norm(x, w, kEps), ops::ref::rms_norm_ref(x.to(at::kDouble), w, kEps), kFp32));
  EXPECT_TRUE(close(ops::rms_norm_gated(x, gate, w, kEps),
                    ops::ref::rms_norm_gated_ref(x.to(at::kDouble), gate, w, kEps), kFp32));
}

TEST(RmsNorm, Bf16AndStrides) {
  const Tensor x = at::randn({2, 9, 64}).to(at::kBFloat16), w = at::randn({64});
  const Tensor y = ops::rms_norm(x, w, kEps);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(close(y, ops::ref::rms_norm_ref(x.to(at::kDouble), w, kEps), kBf16));
  EXPECT_TRUE(bit_equal(ops::rms_norm(x.transpose(0, 1), w, kEps), y.transpose(0, 1)));
  const Tensor wide = at::randn({5, 128});
  const Tensor part = wide.narrow(1, 32, 64);
  EXPECT_TRUE(bit_equal(ops::rms_norm(part, w, kEps), ops::rms_norm(part.contiguous(), w, kEps)));
}

TEST(RmsNorm, RefusesWrongArguments) {
  EXPECT_THROW(ops::rms_norm(at::randn({2, 8}), at::randn({7}), kEps), c10::Error);
  EXPECT_THROW(ops::rms_norm_gated(at::randn({2, 8}), at::randn({2, 7}), at::randn({8}), kEps), c10::Error);
  EXPECT_THROW(ops::rms_norm(at::zeros({2, 8}, at::kLong), at::randn({8}), kEps), c10::Error);
}

}  // namespace
}  // namespace godwit::test
