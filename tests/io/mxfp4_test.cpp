#include "godwit/io/mxfp4.h"

#include <gtest/gtest.h>

#include <bit>
#include <limits>
#include <vector>

#include "godwit/base/rng.h"
#include "tests/support/files.h"

namespace godwit::io {
namespace {

using testing::expect_error;
constexpr auto kDefault = Mxfp4ScaleRule::kCompressedTensors;
constexpr auto kNoSaturation = Mxfp4ScaleRule::kNoSaturation;

struct Packed {
  std::vector<uint8_t> codes, scales;
};

Packed quantize(const std::vector<float>& weights, Mxfp4ScaleRule rule) {
  Packed p{std::vector<uint8_t>(weights.size() / 2), std::vector<uint8_t>(weights.size() / 32)};
  mxfp4_quantize(weights, p.codes, p.scales, rule);
  return p;
}

std::vector<float> dequantize(const Packed& p) {
  std::vector<float> weights(p.codes.size() * 2);
  mxfp4_dequantize(p.codes, p.scales, weights);
  return weights;
}

// A group whose first values are given and whose last one fixes amax.
std::vector<float> group(std::vector<float> values, float amax) {
  values.resize(31, 0.0f);
  values.push_back(amax);
  return values;
}

TEST(Mxfp4, EveryCode) {
  const float magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  for (int code = 0; code < 16; ++code) {
    const float value = (code & 8 ? -1.0f : 1.0f) * magnitudes[code & 7];
    EXPECT_EQ(decode_e2m1(static_cast<uint8_t>(code)), value);
    EXPECT_EQ(std::signbit(decode_e2m1(static_cast<uint8_t>(code))), (code & 8) != 0);
    EXPECT_EQ(encode_e2m1(value), code);
  }
}

TEST(Mxfp4, TiesToTheEvenCodeAndNearestElsewhere) {
  const float ties[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
  for (int lower = 0; lower < 7; ++lower) {
    const int even = lower % 2 == 0 ? lower : lower + 1;
    const float tie = ties[lower];
    EXPECT_EQ(encode_e2m1(tie), even) << tie;
    EXPECT_EQ(encode_e2m1(-tie), even + 8) << tie;
    EXPECT_EQ(encode_e2m1(std::nextafter(tie, 0.0f)), lower) << tie;
    EXPECT_EQ(encode_e2m1(std::nextafter(tie, 9.0f)), lower + 1) << tie;
  }
  EXPECT_EQ(encode_e2m1(1e30f), 7);
  EXPECT_EQ(encode_e2m1(-6.99f), 15);
}

TEST(Mxfp4, ScaleRules) {
  // amax = 6 needs scale 1 in both; the boundaries are mantissa 1.75 against 1.5.
  EXPECT_EQ(mxfp4_scale(6.0f, kDefault), 127);
  EXPECT_EQ(mxfp4_scale(6.0f, kNoSaturation), 127);
  EXPECT_EQ(mxfp4_scale(std::nextafter(7.0f, 0.0f), kDefault), 127);  // 6.99 saturates at 6
  EXPECT_EQ(mxfp4_scale(7.0f, kDefault), 128);                        // mantissa 1.75: the next scale
  EXPECT_EQ(mxfp4_scale(std::nextafter(6.0f, 7.0f), kNoSaturation), 128);
  EXPECT_EQ(mxfp4_scale(4.0f, kDefault), 127);
  EXPECT_EQ(mxfp4_scale(std::nextafter(4.0f, 0.0f), kDefault), 127);  // mantissa 1.99 of the binade below
  EXPECT_EQ(mxfp4_scale(3.5f, kDefault), 127);
  EXPECT_EQ(mxfp4_scale(std::nextafter(3.5f, 0.0f), kDefault), 126);
  EXPECT_EQ(mxfp4_scale(3.0f, kNoSaturation), 126);
  EXPECT_EQ(mxfp4_scale(0.0f, kDefault), 127);
  EXPECT_EQ(mxfp4_scale(std::numeric_limits<float>::denorm_min(), kDefault), 1);
  EXPECT_EQ(mxfp4_scale(std::numeric_limits<float>::max(), kDefault), 253);
  for (uint64_t i = 0; i < 5000; ++i) {  // amax/scale in [3.5, 7) or (3, 6]
    const float amax = std::ldexp(1.0f + static_cast<float>(random_uniform(1, 0, i)),
                                  static_cast<int>(random_bits(1, 1, i) % 200) - 100);
    const float a = amax / decode_e8m0(mxfp4_scale(amax, kDefault));
    const float b = amax / decode_e8m0(mxfp4_scale(amax, kNoSaturation));
    ASSERT_TRUE(a >= 3.5f && a < 7.0f) << amax;
    ASSERT_TRUE(b > 3.0f && b <= 6.0f) << amax;
  }
}

TEST(Mxfp4, NibbleOrderAndPlace) {
  const auto p = quantize(group({0.5f, -1.0f, 3.0f}, 6.0f), kDefault);
  EXPECT_EQ(p.scales[0], 127);
  EXPECT_EQ(p.codes[0], 0xA1);  // even index in the low nibble: 0.5 = 1, -1 = 8 + 2
  EXPECT_EQ(p.codes[1], 0x05);
  EXPECT_EQ(p.codes[15], 0x70);
  const auto w = dequantize(p);
  EXPECT_EQ(w[0], 0.5f);
  EXPECT_EQ(w[1], -1.0f);
  EXPECT_EQ(w[2], 3.0f);
  EXPECT_EQ(w[31], 6.0f);
}

TEST(Mxfp4, SaturationZerosAndSigns) {
  EXPECT_EQ(dequantize(quantize(group({-6.9f}, 6.9f), kDefault))[0], -6.0f);
  EXPECT_EQ(dequantize(quantize(group({-6.9f}, 6.9f), kNoSaturation))[0],
            -6.0f);  // 3.45 of scale 2 is nearest to 3
  const auto zeros = quantize(std::vector<float>(64, 0.0f), kDefault);
  EXPECT_EQ(zeros.codes, std::vector<uint8_t>(32, 0));
  EXPECT_EQ(zeros.scales, std::vector<uint8_t>(2, 127));
  EXPECT_EQ(quantize(std::vector<float>(32, -0.0f), kDefault).codes, std::vector<uint8_t>(16, 0x88));
}

TEST(Mxfp4, BytesSurviveARoundTripWithKeptScales) {
  Packed p{std::vector<uint8_t>(256 * 16), std::vector<uint8_t>(256)};
  for (size_t i = 0; i < p.codes.size(); ++i) p.codes[i] = static_cast<uint8_t>(random_bits(2, 0, i));
  for (size_t g = 0; g < 256; ++g) p.scales[g] = static_cast<uint8_t>(g % 252 + 1);  // 6 * 2^126 is infinite
  const auto weights = dequantize(p);
  std::vector<uint8_t> again(p.codes.size());
  mxfp4_quantize_with_scales(weights, p.scales, again);
  EXPECT_EQ(again, p.codes);
}

TEST(Mxfp4, ExactInBfloat16) {
  Packed p{std::vector<uint8_t>(255 * 16), std::vector<uint8_t>(255)};
  for (size_t g = 0; g < 255; ++g) {
    p.scales[g] = static_cast<uint8_t>(g);
    for (size_t i = 0; i < 16; ++i) p.codes[g * 16 + i] = static_cast<uint8_t>(i | (15 - i) << 4);
  }
  const auto weights = dequantize(p);
  std::vector<uint16_t> bits(weights.size());
  mxfp4_dequantize_bf16(p.codes, p.scales, bits);
  for (size_t i = 0; i < weights.size(); ++i) {
    ASSERT_EQ(std::bit_cast<float>(static_cast<uint32_t>(bits[i]) << 16), weights[i]) << i;
  }
  std::vector<float> nan(32);
  mxfp4_dequantize(std::vector<uint8_t>(16, 0x11), std::vector<uint8_t>{255}, nan);
  for (const float x : nan) EXPECT_TRUE(std::isnan(x));
}

// Relative error of Gaussian weights, averaged over where their deviation lies between two powers of two. A
// numpy computation with a search over all eight magnitudes gives 0.1124 and 0.1170 (other random numbers,
// +-0.0003).
TEST(Mxfp4, GaussianErrorOfBothRules) {
  const auto relative_error = [&](Mxfp4ScaleRule rule) {
    double error = 0, norm = 0;
    for (int phase = 0; phase < 16; ++phase) {
      std::vector<float> weights(1 << 15);
      for (size_t i = 0; i < weights.size(); ++i) {
        const double r = std::sqrt(-2.0 * std::log(1.0 - random_uniform(3, phase, 2 * i)));
        weights[i] = static_cast<float>(std::exp2(phase / 16.0) * r *
                                        std::cos(2 * M_PI * random_uniform(3, phase, 2 * i + 1)));
      }
      const auto back = dequantize(quantize(weights, rule));
      for (size_t i = 0; i < weights.size(); ++i) {
        const double unit = std::exp2(-2 * phase / 16.0);
        error += unit * (back[i] - weights[i]) * (back[i] - weights[i]);
        norm += unit * weights[i] * weights[i];
      }
    }
    return std::sqrt(error / norm);
  };
  EXPECT_NEAR(relative_error(kDefault), 0.1124, 0.0006);
  EXPECT_NEAR(relative_error(kNoSaturation), 0.1170, 0.0006);
}

TEST(Mxfp4, RefusesWrongSizesAndValues) {
  std::vector<float> weights(64, 1.0f);
  std::vector<uint8_t> codes(32), scales(2);
  expect_error([&] { mxfp4_quantize(std::span(weights).first(63), codes, scales, kDefault); },
               {"63 weights are not whole groups"});
  expect_error([&] { mxfp4_quantize(weights, std::span(codes).first(31), scales, kDefault); },
               {"32 packed bytes and 2 scales, got 31"});
  weights[33] = std::numeric_limits<float>::quiet_NaN();
  expect_error([&] { mxfp4_quantize(weights, codes, scales, kDefault); }, {"weight 33 is nan"});
  weights[33] = std::numeric_limits<float>::infinity();
  expect_error([&] { mxfp4_quantize(weights, codes, scales, kDefault); }, {"weight 33 is inf"});
  mxfp4_quantize({}, {}, {}, kDefault);  // nothing is fine
}

}  // namespace
}  // namespace godwit::io
