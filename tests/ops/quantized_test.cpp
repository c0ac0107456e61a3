// Packed weights: the products have the bits of the same products with the weights in fp32, so every property
// of linear and moe_experts (rows that do not depend on one another) carries over.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <tuple>

#include "godwit/ops/ops.h"
#include "godwit/ops/ref/moe_experts_ref.h"
#include "godwit/ops/ref/quantized_ref.h"
#include "tests/support/compare.h"

namespace godwit {
namespace {

using at::Tensor;

TEST(QuantizeInt8, RoundsToTheNearest) {
  at::manual_seed(1);
  Tensor w = at::randn({3, 7, 40});
  w[1][2].zero_();
  const auto [values, scale] = ops::quantize_int8(w);
  EXPECT_EQ(values.sizes(), w.sizes());
  EXPECT_EQ(scale.sizes(), at::IntArrayRef({3, 7}));
  const Tensor error = (ops::ref::dequantize_int8(values, scale) - w).abs();
  EXPECT_TRUE((error <= scale.unsqueeze(-1) * 0.5001).all().item<bool>());
  EXPECT_EQ(values.abs().amax().item<int64_t>(), 127);
  EXPECT_TRUE(values[1][2].eq(0).all().item<bool>());
}

TEST(DequantizeMxfp4, EveryCodeAndScale) {
  // Byte 0xf1 holds 0.5 (low) and -6 (high).
  const Tensor packed = at::full({1, 16}, 0xf1, at::kByte);
  for (const int scale : {0, 1, 126, 127, 128, 254}) {
    const Tensor w = ops::ref::dequantize_mxfp4(packed, at::full({1, 1}, scale, at::kByte));
    EXPECT_EQ(w[0][0].item<float>(), std::ldexp(0.5f, scale - 127));
    EXPECT_EQ(w[0][1].item<float>(), std::ldexp(-6.0f, scale - 127));
  }
}

TEST(LinearInt8, BitsOfTheUnpackedProduct) {
  at::manual_seed(2);
  for (const int64_t depth : {1, 15, 16, 40, 256, 700}) {
    for (const int64_t width : {1, 16, 33, 100}) {
      const auto [values, scale] = ops::quantize_int8(at::randn({width, depth}));
      const Tensor w = ops::ref::dequantize_int8(values, scale);
      for (const int64_t rows : {0, 1, 2, 4, 8, 9, 65, 300}) {
        const Tensor x = at::randn({rows, depth});
        EXPECT_TRUE(test::bit_equal(ops::linear_int8(x, values, scale), ops::linear(x, w)))
            << "M " << rows << " N " << width << " K " << depth;
      }
    }
  }
}

TEST(LinearInt8, TypesAndShapes) {
  at::manual_seed(3);
  const auto [values, scale] = ops::quantize_int8(at::randn({20, 24}));
  const Tensor w = ops::ref::dequantize_int8(values, scale), x = at::randn({3, 5, 24});
  EXPECT_TRUE(test::close(ops::linear_int8(x, values, scale), at::linear(x, w), test::kFp32));
  EXPECT_TRUE(test::close(ops::linear_int8(x.to(at::kDouble), values, scale),
                          at::linear(x.to(at::kDouble), w.to(at::kDouble)), test::kFp64));
  const Tensor half = ops::linear_int8(x.to(at::kBFloat16), values, scale);
  EXPECT_EQ(half.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(test::close(half, at::linear(x, w), test::kBf16));
  EXPECT_EQ(ops::linear_int8(x.to(at::kMeta), values.to(at::kMeta), scale.to(at::kMeta)).sizes(),
            at::IntArrayRef({3, 5, 20}));
  EXPECT_THROW(ops::linear_int8(x, w, scale), c10::Error);
  EXPECT_THROW(ops::linear_int8(x, values, scale.narrow(0, 0, 3)), c10::Error);
  EXPECT_THROW(ops::linear_int8(x.narrow(2, 0, 20), values, scale), c10::Error);
  EXPECT_THROW(ops::linear_int8(x.clone().requires_grad_(true), values, scale), c10::Error);
}

constexpr int64_t kExperts = 6;

ops::QuantizedExperts int8_experts(int64_t inner, int64_t width) {
  ops::QuantizedExperts w;
  std::tie(w.w1, w.s1) = ops::quantize_int8(at::randn({kExperts, inner, width}) * 0.2);
  std::tie(w.w3, w.s3) = ops::quantize_int8(at::randn({kExperts, inner, width}) * 0.2);
  std::tie(w.w2, w.s2) = ops::quantize_int8(at::randn({kExperts, width, inner}) * 0.2);
  return w;
}

ops::QuantizedExperts mxfp4_experts(int64_t inner, int64_t width) {
  const auto packed = [](int64_t rows, int64_t cols) {
    return at::randint(256, {kExperts, rows, cols / 2}, at::kByte);
  };
  const auto scales = [](int64_t rows, int64_t cols) {
    return at::randint(120, 127, {kExperts, rows, cols / 32}, at::kByte);
  };
  return {packed(inner, width), scales(inner, width), packed(inner, width),
          scales(inner, width), packed(width, inner), scales(width, inner)};
}

// Expert 0 gets every token, expert 1 none.
Tensor choices(int64_t tokens) {
  return at::stack({at::zeros({tokens}, at::kInt), at::randint(2, kExperts, {tokens}, at::kInt)}, 1);
}

void expect_unpacked_bits(const ops::QuantizedExperts& w, int64_t width) {
  using ops::ref::dequantize;
  const Tensor w1 = dequantize(w.w1, w.s1), w3 = dequantize(w.w3, w.s3), w2 = dequantize(w.w2, w.s2);
  for (const int64_t tokens : {0, 1, 3, 17, 250}) {
    const Tensor z = at::randn({tokens, width}), experts = choices(tokens), p = at::rand({tokens, 2});
    const Tensor got = ops::moe_experts_quantized(z, experts, p, w, 4, 25);
    EXPECT_TRUE(test::bit_equal(got, ops::moe_experts(z, experts, p, w1, w3, w2, 4, 25)))
        << tokens << " tokens";
    if (tokens != 17) continue;
    const Tensor wide = z.to(at::kDouble);
    EXPECT_TRUE(test::close(got,
                            ops::ref::moe_experts(wide, experts, p.to(at::kDouble), w1.to(at::kDouble),
                                                  w3.to(at::kDouble), w2.to(at::kDouble), 4, 25),
                            test::kFp32Chain));
    EXPECT_TRUE(test::close(ops::moe_experts_quantized(wide, experts, p.to(at::kDouble), w, 4, 25), got,
                            test::kFp32Chain));
    for (int64_t t = 0; t < tokens; ++t) {  // alone = in the batch
      EXPECT_TRUE(test::bit_equal(
          ops::moe_experts_quantized(z.narrow(0, t, 1), experts.narrow(0, t, 1), p.narrow(0, t, 1), w, 4, 25),
          got.narrow(0, t, 1)));
    }
  }
}

TEST(MoeExpertsQuantized, BitsOfTheUnpackedProduct) {
  at::manual_seed(4);
  for (const auto& [inner, width] : {std::pair<int64_t, int64_t>{64, 128}, {32, 96}, {24, 40}, {17, 5}}) {
    expect_unpacked_bits(int8_experts(inner, width), width);
    if (inner % 32 == 0) expect_unpacked_bits(mxfp4_experts(inner, width), width);
  }
}

TEST(MoeExpertsQuantized, RefusesBadArguments) {
  at::manual_seed(5);
  const Tensor z = at::randn({3, 64}), experts = choices(3), p = at::rand({3, 2});
  const auto refused = [&](const ops::QuantizedExperts& w) {
    EXPECT_THROW(ops::moe_experts_quantized(z, experts, p, w, 4, 25), c10::Error);
  };
  ops::QuantizedExperts w = int8_experts(32, 64);
  w.s2 = w.s2.narrow(1, 0, 5);
  refused(w);
  w = mxfp4_experts(32, 64);
  w.s1 = w.s1.to(at::kFloat);
  refused(w);
  w = int8_experts(32, 64);
  w.w1 = w.w1.to(at::kFloat);
  refused(w);
  EXPECT_THROW(ops::moe_experts_quantized(z, experts + 9, p, int8_experts(32, 64), 4, 25), c10::Error);
  EXPECT_THROW(
      ops::moe_experts_quantized(z.clone().requires_grad_(true), experts, p, int8_experts(32, 64), 4, 25),
      c10::Error);
}

}  // namespace
}  // namespace godwit
