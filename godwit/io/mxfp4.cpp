#include "godwit/io/mxfp4.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>

#include "godwit/base/check.h"
#include "godwit/base/parallel.h"

namespace godwit::io {
namespace {

constexpr std::array<float, 8> kMagnitudes{0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
constexpr int64_t kGroupsPerTask = 4096;

constexpr std::array<float, 16> make_elements() {
  std::array<float, 16> values{};
  for (int i = 0; i < 8; ++i) {
    values[i] = kMagnitudes[i];
    values[i + 8] = -kMagnitudes[i];
  }
  return values;
}
constexpr std::array<float, 16> kElements = make_elements();

void check_sizes(size_t weights, size_t packed, size_t scales) {
  check(weights % kMxfp4Group == 0, "mxfp4: {} weights are not whole groups of {}", weights, kMxfp4Group);
  check(packed == weights / 2 && scales == weights / kMxfp4Group,
        "mxfp4: {} weights have {} packed bytes and {} scales, got {} and {}", weights, weights / 2,
        weights / kMxfp4Group, packed, scales);
}

// 32 weights by one scale. The quotient is exact unless it is subnormal, far below the smallest element.
void encode_group(const float* weights, float scale, uint8_t* packed) {
  for (int i = 0; i < kMxfp4Group / 2; ++i) {
    packed[i] = static_cast<uint8_t>(encode_e2m1(weights[2 * i] / scale) |
                                     encode_e2m1(weights[2 * i + 1] / scale) << 4);
  }
}

template <class Out, class Convert>
void dequantize(std::span<const uint8_t> packed, std::span<const uint8_t> scales, std::span<Out> weights,
                Convert convert) {
  check_sizes(weights.size(), packed.size(), scales.size());
  parallel_for(0, static_cast<int64_t>(scales.size()), kGroupsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) {
      std::array<Out, 16> table;
      const float scale = decode_e8m0(scales[g]);
      for (int c = 0; c < 16; ++c) table[c] = convert(kElements[c] * scale);
      const uint8_t* from = packed.data() + g * (kMxfp4Group / 2);
      Out* to = weights.data() + g * kMxfp4Group;
      for (int i = 0; i < kMxfp4Group / 2; ++i) {
        to[2 * i] = table[from[i] & 15];
        to[2 * i + 1] = table[from[i] >> 4];
      }
    }
  });
}

}  // namespace

float decode_e8m0(uint8_t byte) {
  if (byte == 255) return std::numeric_limits<float>::quiet_NaN();
  return std::ldexp(1.0f, static_cast<int>(byte) - 127);
}

float decode_e2m1(uint8_t code) {
  return kElements[code & 15];
}

uint8_t encode_e2m1(float x) {
  const float a = std::fabs(x);
  // Midpoints of neighbours; on a tie the code with an even last bit wins, so >= where the upper code is
  // even.
  const int code =
      (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
  return static_cast<uint8_t>(code | (std::signbit(x) ? 8 : 0));
}

uint8_t mxfp4_scale(float amax, Mxfp4ScaleRule rule) {
  if (amax == 0.0f) return 127;
  int exponent = 0;
  const float mantissa =
      2.0f * std::frexp(amax, &exponent);  // amax = mantissa * 2^(exponent - 1), mantissa in [1, 2)
  const bool up = rule == Mxfp4ScaleRule::kCompressedTensors ? mantissa >= 1.75f : mantissa > 1.5f;
  return static_cast<uint8_t>(std::clamp(127 + (exponent - 1) - 2 + (up ? 1 : 0), 1, 254));
}

void mxfp4_quantize(std::span<const float> weights, std::span<uint8_t> packed, std::span<uint8_t> scales,
                    Mxfp4ScaleRule rule) {
  check_sizes(weights.size(), packed.size(), scales.size());
  parallel_for(0, static_cast<int64_t>(scales.size()), kGroupsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) {
      const float* group = weights.data() + g * kMxfp4Group;
      float amax = 0.0f;
      for (int i = 0; i < kMxfp4Group; ++i) {
        check(std::fabs(group[i]) < kMxfp4Limit, "mxfp4: weight {} is {}", g * kMxfp4Group + i, group[i]);
        amax = std::max(amax, std::fabs(group[i]));
      }
      scales[g] = mxfp4_scale(amax, rule);
      encode_group(group, decode_e8m0(scales[g]), packed.data() + g * (kMxfp4Group / 2));
    }
  });
}

void mxfp4_quantize_with_scales(std::span<const float> weights, std::span<const uint8_t> scales,
                                std::span<uint8_t> packed) {
  check_sizes(weights.size(), packed.size(), scales.size());
  parallel_for(0, static_cast<int64_t>(scales.size()), kGroupsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) {
      check(scales[g] != 255, "mxfp4: scale {} is NaN", g);
      encode_group(weights.data() + g * kMxfp4Group, decode_e8m0(scales[g]),
                   packed.data() + g * (kMxfp4Group / 2));
    }
  });
}

void mxfp4_dequantize(std::span<const uint8_t> packed, std::span<const uint8_t> scales,
                      std::span<float> weights) {
  dequantize(packed, scales, weights, [](float x) { return x; });
}

void mxfp4_dequantize_bf16(std::span<const uint8_t> packed, std::span<const uint8_t> scales,
                           std::span<uint16_t> weights) {
  // Two significant bits always fit: the upper half of the float is the value. A NaN keeps its quiet bit.
  dequantize(packed, scales, weights,
             [](float x) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16); });
}

}  // namespace godwit::io
