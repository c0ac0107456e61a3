// Which stored values are not finite, in every floating type and around the limit of every type they may get.
#include "godwit/io/finite.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "godwit/io/mxfp4.h"
#include "tests/support/files.h"

namespace godwit::io {
namespace {

using testing::expect_error;

constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

template <class T>
Bytes bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

std::vector<int64_t> bad_floats(const std::vector<float>& values, double limit = kInf) {
  const NotFinite found = find_not_finite(bytes_of(values), Dtype::F32, limit);
  EXPECT_EQ(found.count, static_cast<int64_t>(found.first.size()));
  return found.first;
}

TEST(Finite, EveryTypeAroundEveryLimit) {
  const float max = std::numeric_limits<float>::max();
  const std::vector<float> values = {
      0.0f,     max,       -max,      kInf, -kInf, kNan, -kNan, 0x1.ffp127f, 0x1.fefffep127f,
      65520.0f, -65519.0f, 0x1.cp127f};
  EXPECT_EQ(bad_floats(values), (std::vector<int64_t>{3, 4, 5, 6}));
  EXPECT_EQ(bad_floats(values, finite_limit(Dtype::F32)), (std::vector<int64_t>{3, 4, 5, 6}));
  EXPECT_EQ(bad_floats(values, finite_limit(Dtype::BF16)), (std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(bad_floats(values, finite_limit(Dtype::F16)),
            (std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8, 9, 11}));
  EXPECT_EQ(bad_floats(values, kMxfp4Limit), (std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8, 11}));

  const std::vector<double> doubles = {1e300, 0x1.ffffffp127, 0x1.fffffe8p127, -0x1.fefffe8p127, NAN};
  EXPECT_EQ(find_not_finite(bytes_of(doubles), Dtype::F64).first, (std::vector<int64_t>{0, 1, 4}));
  EXPECT_EQ(find_not_finite(bytes_of(doubles), Dtype::F64, finite_limit(Dtype::BF16)).first,
            (std::vector<int64_t>{0, 1, 2, 4}));

  // 1, the largest, infinity, NaN, -infinity, 65536 (bf16)
  const std::vector<uint16_t> bf16 = {0x3f80, 0x7f7f, 0x7f80, 0xffc0, 0xff80, 0x4780, 0x477f};
  EXPECT_EQ(find_not_finite(bytes_of(bf16), Dtype::BF16).first, (std::vector<int64_t>{2, 3, 4}));
  EXPECT_EQ(find_not_finite(bytes_of(bf16), Dtype::BF16, finite_limit(Dtype::BF16)).first,
            (std::vector<int64_t>{2, 3, 4}));
  EXPECT_EQ(find_not_finite(bytes_of(bf16), Dtype::BF16, finite_limit(Dtype::F16)).first,
            (std::vector<int64_t>{1, 2, 3, 4, 5}));
  const std::vector<uint16_t> f16 = {0x3c00, 0x7bff, 0x7c00, 0xfe00};
  for (const Dtype to : {Dtype::F16, Dtype::BF16, Dtype::F32})
    EXPECT_EQ(find_not_finite(bytes_of(f16), Dtype::F16, finite_limit(to)).first,
              (std::vector<int64_t>{2, 3}));
  expect_error([] { find_not_finite({}, Dtype::U8); }, {"U8 is no floating type"});
}

TEST(Finite, CountsAllAndNamesTheFirstTen) {
  std::vector<float> values(200'000, 1.0f);  // several blocks
  EXPECT_TRUE(bad_floats(values).empty());
  for (size_t i = 60'000; i < 200'000; i += 7'000) values[i] = kNan;
  const NotFinite found = find_not_finite(bytes_of(values), Dtype::F32);
  EXPECT_EQ(found.count, 20);
  ASSERT_EQ(found.first.size(), 10u);
  EXPECT_EQ(found.first[1], 67'000);
  const int64_t shape[] = {100, 2000};
  expect_error([&] { check_finite(found, "f: w", shape, "F32"); },
               {"f: w: 20 of 200000 values are not finite as F32: [30, 0], [33, 1000], ", "[61, 1000], ..."});
  check_finite({}, "f: w", shape, "F32");
  // Bytes that no alignment helps with.
  std::vector<std::byte> shifted(4 * 5 + 1);
  const std::vector<float> few = {1, 2, kInf, 3, 4};
  std::ranges::copy(bytes_of(few), shifted.begin() + 1);
  EXPECT_EQ(find_not_finite(Bytes(shifted).subspan(1), Dtype::F32).first, std::vector<int64_t>{2});
  EXPECT_EQ(find_not_finite({}, Dtype::BF16).count, 0);
}

// Every scale with every code against the values that they stand for.
TEST(Finite, Mxfp4AsItsValuesAre) {
  for (int scale = 0; scale < 256; ++scale) {
    std::vector<uint8_t> packed(16), scales = {static_cast<uint8_t>(scale)};
    for (int i = 0; i < 16; ++i) packed[i] = static_cast<uint8_t>(i | (15 - i) << 4);
    std::vector<float> values(32);
    mxfp4_dequantize(packed, scales, values);
    std::vector<int64_t> expected;
    for (int i = 0; i < 32; ++i)
      if (!std::isfinite(values[i])) expected.push_back(i);
    const NotFinite found = find_not_finite_mxfp4(packed, scales);
    EXPECT_EQ(found.count, static_cast<int64_t>(expected.size())) << scale;
    expected.resize(std::min<size_t>(expected.size(), 10));
    EXPECT_EQ(found.first, expected) << scale;
  }
}

// What the quantiser makes is finite up to its limit, by either rule.
TEST(Finite, Mxfp4QuantiserStaysFinite) {
  for (const auto rule : {Mxfp4ScaleRule::kCompressedTensors, Mxfp4ScaleRule::kNoSaturation}) {
    std::vector<float> weights(32, 1.0f);
    std::vector<uint8_t> packed(16), scales(1);
    weights[5] = std::nextafter(kMxfp4Limit, 0.0f);
    mxfp4_quantize(weights, packed, scales, rule);
    EXPECT_EQ(find_not_finite_mxfp4(packed, scales).count, 0);
    weights[5] = -kMxfp4Limit;
    expect_error([&] { mxfp4_quantize(weights, packed, scales, rule); }, {"weight 5 is -2.97"});
  }
}

}  // namespace
}  // namespace godwit::io
