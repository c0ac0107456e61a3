// Character classes of the K3 split pattern, as flags a code point, in the Unicode version of tiktoken's
// regular expressions.
#pragma once

#include <cstdint>

namespace godwit {

// A code point without flags is punctuation, a symbol, a control character or unassigned.
enum CharClass : uint8_t {
  kUpper = 1,     // [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]
  kLower = 2,     // [\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]
  kHan = 4,       // \p{Han}: script, so letters, numbers, radicals and marks
  kLetter = 8,    // \p{L}
  kNumber = 16,   // \p{N}
  kSpace = 32,    // \s: White_Space
  kNewline = 64,  // \r and \n
};

inline constexpr uint32_t kCodePoints = 0x110000;

// kCodePoints entries. One flat table: a text touches only the pages of its scripts.
const uint8_t* char_classes();

}  // namespace godwit
