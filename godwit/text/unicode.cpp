#include "godwit/text/unicode.h"

#include <algorithm>
#include <memory>

namespace godwit {
namespace {

struct Range {
  uint32_t first, last;
  uint8_t classes;
};

// The letters of unicode_table.inc.
constexpr uint8_t UA = kUpper | kLetter;
constexpr uint8_t LA = kLower | kLetter;
constexpr uint8_t UL = kUpper | kLower;  // combining marks
constexpr uint8_t ULA = kUpper | kLower | kLetter;
constexpr uint8_t H = kHan;
constexpr uint8_t HA = kHan | kLetter;
constexpr uint8_t HN = kHan | kNumber;
constexpr uint8_t N = kNumber;
constexpr uint8_t S = kSpace;
constexpr uint8_t SR = kSpace | kNewline;

constexpr Range kRanges[] = {
#include "godwit/text/unicode_table.inc"
};

std::unique_ptr<uint8_t[]> expand() {
  auto table = std::make_unique<uint8_t[]>(kCodePoints);  // zeros
  for (const Range& range : kRanges) {
    std::fill(table.get() + range.first, table.get() + range.last + 1, range.classes);
  }
  return table;
}

}  // namespace

const uint8_t* char_classes() {
  static const std::unique_ptr<uint8_t[]> table = expand();
  return table.get();
}

}  // namespace godwit
