// Stored values that are not finite: a NaN, an infinity, or what becomes one in a narrower type.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

#include "godwit/io/file.h"
#include "godwit/io/tensor_spec.h"

namespace godwit::io {

struct NotFinite {
  int64_t count = 0;
  std::vector<int64_t> first;  // flat indices of the first ten
};

// The smallest magnitude that rounds to infinity in a floating type.
double finite_limit(Dtype to);

// Elements of floating type `from` that are NaN or of magnitude `limit` and more.
NotFinite find_not_finite(Bytes bytes, Dtype from, double limit = std::numeric_limits<double>::infinity());

// MXFP4 values that are not finite in fp32: scale 255 is NaN, 253 and 254 overflow with the larger elements.
NotFinite find_not_finite_mxfp4(std::span<const uint8_t> packed, std::span<const uint8_t> scales);

// "2 of 64 values are not finite as BF16: [0, 3], [1, 7]"; an Error that begins with `where` if there are
// any. `as` says what in.
void check_finite(const NotFinite& found, std::string_view where, std::span<const int64_t> shape,
                  std::string_view as);

}  // namespace godwit::io
