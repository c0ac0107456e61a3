#include "godwit/text/pretokenize.h"

#include <bit>
#include <cstring>

#include "godwit/text/unicode.h"
#include "godwit/text/utf8.h"

namespace godwit {
namespace {

constexpr size_t kCutCharacters = 400'000;
constexpr size_t kCutRun = 25'000;

bool is_other(uint8_t classes) {
  return (classes & (kLetter | kNumber | kSpace)) == 0;
}
bool is_prefix(uint8_t classes) {
  return (classes & (kLetter | kNumber | kNewline)) == 0;
}

// How many of the 8 bytes at `data` are a..z before the first that is not.
inline size_t lower_case_run(const char* data) {
  uint64_t x;
  std::memcpy(&x, data, sizeof x);
  constexpr uint64_t kOnes = 0x0101010101010101, kHigh = 0x80 * kOnes;
  const uint64_t low = x & ~kHigh;                       // so that no sum carries into the next byte
  const uint64_t from_a = low + (0x80 - 'a') * kOnes;    // high bit: at least 'a'
  const uint64_t beyond_z = low + (0x7f - 'z') * kOnes;  // high bit: more than 'z'
  const uint64_t others = ~(from_a & ~beyond_z & ~x) & kHigh;
  return others == 0 ? 8 : static_cast<size_t>(std::countr_zero(others)) / 8;
}

}  // namespace

Pretokenizer::Pretokenizer(std::string_view text) : text_(text), classes_(char_classes()) {}

inline Pretokenizer::Char Pretokenizer::char_at(size_t pos) const {
  if (pos >= text_.size()) return {0, 0};
  const auto byte = static_cast<uint8_t>(text_[pos]);
  if (byte < 0x80) return {classes_[byte], 1};
  const Utf8Char c = decode_utf8(text_, pos);
  return {classes_[c.code], static_cast<uint8_t>(c.length)};
}

// Past all characters that have one of `classes`.
inline size_t Pretokenizer::skip_run(size_t pos, uint8_t classes) const {
  while (true) {
    const Char c = char_at(pos);
    if ((c.classes & classes) == 0) return pos;
    pos += c.length;
  }
}

// Past L*; most letters of most texts are a..z.
inline size_t Pretokenizer::skip_lower(size_t pos) const {
  while (pos + 8 <= text_.size()) {
    const size_t n = lower_case_run(text_.data() + pos);
    pos += n;
    if (n < 8) break;
  }
  return skip_run(pos, kLower);
}

// [^\s\p{L}\p{N}]*
inline size_t Pretokenizer::skip_others(size_t pos) const {
  while (true) {
    const Char c = char_at(pos);
    if (c.length == 0 || !is_other(c.classes)) return pos;
    pos += c.length;
  }
}

// (?i:'s|'t|'re|'ve|'m|'ll|'d)? Simple case folding puts U+017F (long s, bytes c5 bf) beside s and no other
// letter beside these.
inline size_t Pretokenizer::skip_contraction(size_t pos) const {
  if (pos + 1 >= text_.size() || text_[pos] != '\'') return pos;
  const auto lower = [&](size_t i) { return i < text_.size() ? static_cast<char>(text_[i] | 0x20) : '\0'; };
  const char first = lower(pos + 1), second = lower(pos + 2);
  if (first == 's' || first == 't' || first == 'm' || first == 'd') return pos + 2;
  if (first == 'r' && second == 'e') return pos + 3;
  if (first == 'v' && second == 'e') return pos + 3;
  if (first == 'l' && second == 'l') return pos + 3;
  if (text_.substr(pos + 1, 2) == "\xc5\xbf") return pos + 3;
  return pos;
}

// U*L+ from `pos`, or U+ if that is all there is; `pos` if neither. Greedy U* runs to the end of the U's; if
// no L follows, backtracking gives characters back until one that is also an L: the last such of the run ends
// the match.
inline size_t Pretokenizer::word_end(size_t pos, bool& has_lower) const {
  size_t end = pos, last_both_end = pos;
  while (true) {
    const Char c = char_at(end);
    if ((c.classes & kUpper) == 0) {
      has_lower = (c.classes & kLower) != 0;
      if (has_lower) return skip_lower(end + c.length);
      break;
    }
    end += c.length;
    if (c.classes & kLower) last_both_end = end;
  }
  has_lower = last_both_end > pos;
  return has_lower ? last_both_end : end;
}

// Alternatives 6, 7, 8 at a white space.
size_t Pretokenizer::space_end(size_t pos) const {
  size_t end = pos, last_begin = pos, newline_end = pos;
  while (true) {
    const Char c = char_at(end);
    if ((c.classes & kSpace) == 0) break;
    last_begin = end;
    end += c.length;
    if (c.classes & kNewline) newline_end = end;
  }
  if (newline_end > pos) return newline_end;                 // 6
  if (end == text_.size() || last_begin == pos) return end;  // 7 at the end of the text; 8
  return last_begin;                                         // 7: all but the last, which is followed by \S
}

size_t Pretokenizer::piece_end(size_t pos) const {
  const Char first = char_at(pos);
  if (first.classes & kHan) return skip_run(pos + first.length, kHan);  // 1
  // 2 and 3, in the order: 2 with the optional first character, 2 without, 3 with, 3 without.
  bool has_lower = false;
  if (is_prefix(first.classes)) {
    const size_t begin = pos + first.length;
    const size_t end = word_end(begin, has_lower);
    if (has_lower) return skip_contraction(end);
    // A combining mark is a prefix and a U and an L: it can match 2 alone.
    if (first.classes & kUpper) return skip_contraction(word_end(pos, has_lower));
    if (end > begin) return skip_contraction(end);
  } else if (first.classes & kLetter) {
    return skip_contraction(word_end(pos, has_lower));
  }
  if (first.classes & kNumber) {  // 4
    size_t end = pos + first.length;
    for (int i = 1; i < 3; ++i) {
      const Char c = char_at(end);
      if ((c.classes & kNumber) == 0) break;
      end += c.length;
    }
    return end;
  }
  // 5
  const size_t others = text_[pos] == ' ' ? pos + 1 : pos;
  const size_t others_end = skip_others(others);
  if (others_end > others) return skip_run(others_end, kNewline);
  return space_end(pos);
}

std::vector<std::string_view> cut_long_text(std::string_view text) {
  std::vector<std::string_view> parts;
  if (text.size() <= kCutRun) {  // no more characters than bytes
    if (!text.empty()) parts.push_back(text);
    return parts;
  }
  const uint8_t* classes = char_classes();
  size_t begin = 0, characters = 0, run = 0;
  bool run_is_space = false;
  for (size_t pos = 0; pos < text.size();) {
    const Utf8Char c = decode_utf8(text, pos);
    const bool is_space = (classes[c.code] & kSpace) != 0;
    const bool full = characters == kCutCharacters;
    if (full) characters = 0;
    run = characters == 0 || is_space != run_is_space ? 1 : run + 1;
    if (full || run > kCutRun) {
      parts.push_back(text.substr(begin, pos - begin));
      begin = pos;
      run = 1;
    }
    run_is_space = is_space;
    ++characters;
    pos += c.length;
  }
  parts.push_back(text.substr(begin));
  return parts;
}

}  // namespace godwit
