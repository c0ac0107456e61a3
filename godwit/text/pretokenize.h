// The K3 split pattern by hand: text into the pieces that byte-pair encoding works on. With Han a script and
// U, L the classes
// [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]] and [\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]], the first
// alternative that matches decides, as in a backtracking regular expression:
//
//   1  [\p{Han}]+
//   2  [^\r\n\p{L}\p{N}]?U*L+(?i:'s|'t|'re|'ve|'m|'ll|'d)?
//   3  [^\r\n\p{L}\p{N}]?U+L*(?i:'s|'t|'re|'ve|'m|'ll|'d)?
//   4  \p{N}{1,3}
//   5   ?[^\s\p{L}\p{N}]+[\r\n]*
//   6  \s*[\r\n]+
//   7  \s+(?!\S)
//   8  \s+
//
// The pieces cover the text. Time is linear in it: nothing is read more than a few times, whatever the runs.
// A maximal invalid subpart of UTF-8 counts as one character of no class, as U+FFFD does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace godwit {

class Pretokenizer {
 public:
  explicit Pretokenizer(std::string_view text);

  bool done() const { return pos_ == text_.size(); }
  // The next piece; only when not done().
  std::string_view next() {
    const size_t begin = pos_;
    pos_ = piece_end(begin);
    return text_.substr(begin, pos_ - begin);
  }

 private:
  struct Char {
    uint8_t classes;
    uint8_t length;  // 0 at the end of the text
  };
  Char char_at(size_t pos) const;
  size_t skip_run(size_t pos, uint8_t classes) const;
  size_t skip_lower(size_t pos) const;
  size_t skip_others(size_t pos) const;
  size_t skip_contraction(size_t pos) const;
  size_t word_end(size_t pos, bool& has_lower) const;
  size_t space_end(size_t pos) const;
  size_t piece_end(size_t pos) const;

  std::string_view text_;
  const uint8_t* classes_;
  size_t pos_ = 0;
};

// What K3's released tokenizer does before it encodes: every 400,000 characters a cut, then inside each part
// a cut wherever more than 25,000 characters in a row are all White_Space or all not. Most texts come back
// whole.
std::vector<std::string_view> cut_long_text(std::string_view text);

}  // namespace godwit
