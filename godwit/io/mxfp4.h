// MXFP4: groups of 32 values share one power-of-two scale (OCP Microscaling Formats v1.0).
//   element  E2M1, 4 bits: bit 3 the sign, bits 0-2 one of {0, 0.5, 1, 1.5, 2, 3, 4, 6}
//   packed   two elements a byte, the even index in the low nibble: a row of n values has n/2 bytes
//   scale    E8M0, one byte a group: 2^(byte - 127); 255 is NaN
// w = element * scale, exact in bfloat16 and float. This is the layout of compressed-tensors'
// `mxfp4-pack-quantized`: weight_packed [out, in/2], weight_scale [out, in/32], rows as they are, no swizzle.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>

namespace godwit::io {

inline constexpr int64_t kMxfp4Group = 32;
// Weights of this magnitude and more become infinite: 3.5 * 2^126 is nearest to 4 * 2^126.
inline constexpr float kMxfp4Limit = 0x1.cp127f;

// How a group's scale follows from amax, its largest magnitude.
enum class Mxfp4ScaleRule {
  // compressed-tensors: byte = 127 + floor(log2 amax) - 2, one more if amax's mantissa is at least 1.75.
  // amax/scale is in [3.5, 7);
  // above 6 saturates.
  kCompressedTensors,
  // The smallest power of two with amax/scale <= 6: nothing saturates. amax/scale is in (3, 6].
  kNoSaturation,
};

// A group of zeros gets 127 (scale 1). The result is in [1, 254]. `amax` must be finite and not negative.
uint8_t mxfp4_scale(float amax, Mxfp4ScaleRule rule);

// Nearest element, ties to the even code, magnitudes above 6 to 6. Keeps the sign of zero. NaN is not
// allowed.
uint8_t encode_e2m1(float x);
float decode_e2m1(uint8_t code);  // the low four bits
float decode_e8m0(uint8_t byte);

// weights: whole groups. packed: weights/2 bytes; scales: weights/32. A weight of kMxfp4Limit or more, or
// NaN, is an Error.
void mxfp4_quantize(std::span<const float> weights, std::span<uint8_t> packed, std::span<uint8_t> scales,
                    Mxfp4ScaleRule rule);
// The same with scales given, as for writing back a checkpoint whose scales are kept: its bytes then do not
// change.
void mxfp4_quantize_with_scales(std::span<const float> weights, std::span<const uint8_t> scales,
                                std::span<uint8_t> packed);

void mxfp4_dequantize(std::span<const uint8_t> packed, std::span<const uint8_t> scales,
                      std::span<float> weights);
// As bfloat16 bits.
void mxfp4_dequantize_bf16(std::span<const uint8_t> packed, std::span<const uint8_t> scales,
                           std::span<uint16_t> weights);

}  // namespace godwit::io
