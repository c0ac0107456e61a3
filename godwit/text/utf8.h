// UTF-8, strict: no overlong forms, no surrogates, nothing above U+10FFFF. What is invalid is measured in
// maximal subparts (Unicode 16, section 3.9; the same as WHATWG, Python's errors="replace" and Rust's
// from_utf8_lossy).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace godwit {

struct Utf8Char {
  uint32_t code;    // U+FFFD when invalid
  uint32_t length;  // bytes, at least 1
  bool valid;
  bool truncated;  // invalid only because the text ends here: more bytes could make it valid
};

// The character at text[pos]; pos < text.size().
Utf8Char decode_utf8(std::string_view text, size_t pos);

void append_utf8(uint32_t code, std::string& out);

// Bytes of the longest prefix that is valid.
size_t valid_utf8_prefix(std::string_view text);

// U+FFFD for every maximal invalid subpart.
std::string replace_invalid_utf8(std::string_view text);

}  // namespace godwit
