// Parts of a grammar for what stands between quotation marks: characters, strings, regular expressions.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "godwit/text/grammar.h"

namespace godwit {

// Code points as sorted ranges that do not touch; never surrogates.
class CharSet {
 public:
  struct Range {
    uint32_t low, high;
    bool operator==(const Range&) const = default;
  };
  CharSet() = default;
  CharSet(std::initializer_list<Range> ranges);
  static CharSet all() { return {{0, 0x10ffff}}; }

  void add(uint32_t low, uint32_t high);
  void add(const CharSet& other);
  CharSet complement() const;
  const std::vector<Range>& ranges() const { return ranges_; }
  bool contains(uint32_t code) const;
  bool empty() const { return ranges_.empty(); }

 private:
  std::vector<Range> ranges_;
};

// How text is written: inside a JSON string, or as it is (arguments of tools that are strings).
enum class Quoting { kJson, kRaw };

// An edge for every character of the set, to `to`. In a JSON string the quotation mark, the backslash and
// control characters are written as their one escape each.
void add_chars(Grammar& g, int32_t from, int32_t to, const CharSet& set, Quoting quoting);

// Any text; in a JSON string with all escapes that JSON knows, surrogates in pairs only. Without the
// quotation marks. A loop at `from`: it may end at any character.
void add_any_text(Grammar& g, int32_t from, Quoting quoting);

// Text of `least` to `most` characters (most < 0: no limit); gives the node behind it.
int32_t add_counted_text(Grammar& g, int32_t from, int64_t least, int64_t most, Quoting quoting);

// Text that a regular expression (ECMA-262) is found in; gives the node behind it. Taken are literals, .,
// classes, groups, |, * + ? {m,n}, and ^ and $ at the ends of an alternative of the whole. \d \w \s are
// ASCII's. Throws Error that says what is not taken: look-around, references, \b, \p.
int32_t add_pattern(Grammar& g, int32_t from, std::string_view pattern, Quoting quoting);

// The pattern of a JSON schema `format`: date-time, date, time, duration, email, hostname, ipv4, ipv6, uuid;
// empty for others.
std::string_view format_pattern(std::string_view format);

}  // namespace godwit
