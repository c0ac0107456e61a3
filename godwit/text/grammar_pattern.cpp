// Regular expressions as parts of a grammar: a recursive descent into a tree, and Thompson's construction.
#include <algorithm>
#include <cctype>
#include <string>

#include "godwit/base/check.h"
#include "godwit/text/grammar_text.h"
#include "godwit/text/utf8.h"

namespace godwit {
namespace {

constexpr size_t kLongestPattern = 4096;
constexpr int kDeepestGroup = 64;
constexpr int64_t kMostRepeats = 1000;

struct Piece;
using Sequence = std::vector<Piece>;

// A set of characters or a group, repeated.
struct Piece {
  CharSet set;
  std::vector<Sequence> alternatives;  // of a group; empty for a set
  int64_t least = 1, most = 1;         // most < 0: without limit
};

// `narrow` holds what every dialect takes for the class, `wide` what any does: the dialects differ on whether
// \d \w \s go beyond ASCII.
struct Class {
  CharSet narrow, wide;
};

const CharSet& blanks() {
  static const CharSet set = {{0x09, 0x0d},     {0x1c, 0x20},     {0x85, 0x85},     {0xa0, 0xa0},
                              {0x1680, 0x1680}, {0x2000, 0x200a}, {0x2028, 0x2029}, {0x202f, 0x202f},
                              {0x205f, 0x205f}, {0x3000, 0x3000}, {0xfeff, 0xfeff}};
  return set;
}

Class class_of(char letter) {
  const CharSet beyond = {{0x80, 0x10ffff}}, ascii = {{0, 0x7f}};
  const auto both = [](CharSet a, const CharSet& b) {
    a.add(b);
    return a;
  };
  const auto within_ascii = [&](const CharSet& set) {
    CharSet outside = set.complement();
    outside.add(beyond);
    return outside.complement();
  };
  const CharSet digits = {{'0', '9'}}, word = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
  switch (letter) {
    case 'd':
      return {digits, both(digits, beyond)};
    case 'D':
      return {within_ascii(digits.complement()), digits.complement()};
    case 'w':
      return {word, both(word, beyond)};
    case 'W':
      return {within_ascii(word.complement()), word.complement()};
    case 's':
      return {{{0x09, 0x0d}, {' ', ' '}}, blanks()};
    default:  // S
      return {blanks().complement(), CharSet({{0x09, 0x0d}, {' ', ' '}}).complement()};
  }
}

class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {
    check(text.size() <= kLongestPattern, "pattern: longer than {} bytes", kLongestPattern);
    check(valid_utf8_prefix(text) == text.size(), "pattern: not UTF-8");
  }

  struct Alternative {
    Sequence sequence;
    bool from_start = false, to_end = false;
  };

  std::vector<Alternative> whole() {
    std::vector<Alternative> out;
    do {
      Alternative& alternative = out.emplace_back();
      while (take('^')) alternative.from_start = true;
      alternative.sequence = sequence(/*depth=*/0);
      while (take('$')) alternative.to_end = true;
    } while (take('|'));
    if (more()) fail("pattern: '{}' at {} stands where it cannot", peek(), at_);
    return out;
  }

 private:
  bool more() const { return at_ < text_.size(); }
  char peek() const { return text_[at_]; }
  bool take(char c) {
    if (!more() || peek() != c) return false;
    ++at_;
    return true;
  }
  [[noreturn]] void refuse(std::string_view what) const {
    fail("pattern: {} at {} is not supported", what, at_);
  }

  uint32_t code_point() {
    const Utf8Char c = decode_utf8(text_, at_);
    at_ += c.length;
    return c.code;
  }

  Sequence sequence(int depth) {
    Sequence out;
    while (more() && peek() != '|' && peek() != ')') {
      if (peek() == '$' && depth == 0) break;
      if (peek() == '^' || peek() == '$') refuse("an anchor inside the expression");
      Piece piece = atom(depth);
      quantifier(piece);
      out.push_back(std::move(piece));
    }
    return out;
  }

  Piece atom(int depth) {
    Piece piece;
    if (take('(')) {
      check(depth < kDeepestGroup, "pattern: groups nested deeper than {}", kDeepestGroup);
      if (take('?')) {
        if (take('<') && more() && peek() != '=' && peek() != '!') {
          while (more() && peek() != '>') ++at_;
          check(take('>'), "pattern: the name of a group does not end");
        } else if (!take(':')) {
          refuse("a group that looks around");
        }
      }
      do {
        piece.alternatives.push_back(sequence(depth + 1));
      } while (take('|'));
      check(take(')'), "pattern: a group is not closed");
    } else if (take('[')) {
      piece.set = bracket();
    } else if (take('.')) {
      piece.set = CharSet({{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}}).complement();
    } else if (take('\\')) {
      piece.set = escape().narrow;
    } else {
      const char c = peek();
      check(c != '*' && c != '+' && c != '?' && c != '{' && c != '}' && c != ']',
            "pattern: '{}' at {} stands where it cannot", c, at_);
      const uint32_t code = code_point();
      piece.set.add(code, code);
    }
    return piece;
  }

  int64_t number() {
    int64_t value = -1;
    while (more() && peek() >= '0' && peek() <= '9') {
      value = std::max<int64_t>(value, 0) * 10 + (text_[at_++] - '0');
      check(value <= kMostRepeats, "pattern: more than {} repeats", kMostRepeats);
    }
    return value;
  }

  void quantifier(Piece& piece) {
    if (take('*')) {
      piece.least = 0;
      piece.most = -1;
    } else if (take('+')) {
      piece.most = -1;
    } else if (take('?')) {
      piece.least = 0;
    } else if (take('{')) {
      piece.least = piece.most = number();
      check(piece.least >= 0, "pattern: a number is missing behind '{{'");
      if (take(',')) piece.most = number();
      check(take('}') && (piece.most < 0 || piece.most >= piece.least),
            "pattern: malformed repeats before {}", at_);
    } else {
      return;
    }
    take('?');  // lazy: the same texts
    check(!more() || (peek() != '*' && peek() != '+' && peek() != '?' && peek() != '{'),
          "pattern: a quantifier of a quantifier at {}", at_);
  }

  uint32_t hex(int digits) {
    uint32_t code = 0;
    for (int i = 0; i < digits; ++i) {
      check(more() && std::isxdigit(static_cast<unsigned char>(peek())),
            "pattern: a hexadecimal digit is missing at {}", at_);
      const char c = text_[at_++];
      code = code * 16 + static_cast<uint32_t>(c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10);
    }
    return code;
  }

  // Behind a backslash.
  Class escape() {
    check(more(), "pattern: ends with a backslash");
    const char c = peek();
    if (static_cast<unsigned char>(c) >= 0x80) refuse("an escaped letter");
    ++at_;
    uint32_t code = 0;
    constexpr std::pair<char, uint32_t> kControls[] = {
        {'n', '\n'}, {'r', '\r'}, {'t', '\t'}, {'f', '\f'}, {'v', '\v'}};
    for (const auto& [letter, value] : kControls) {
      if (c == letter) code = value;
    }
    if (code == 0) {
      if (std::string_view("dDwWsS").find(c) != std::string_view::npos) return class_of(c);
      if (c == 'u' || c == 'x') {
        code = hex(c == 'u' ? 4 : 2);
        if (code >= 0xd800 && code <= 0xdfff) refuse("a surrogate");
      } else if (std::isalnum(static_cast<unsigned char>(c))) {
        --at_;
        refuse(fmt::format("\\{}", c));
      } else {
        code = static_cast<unsigned char>(c);
      }
    }
    const CharSet one = {{code, code}};
    return {one, one};
  }

  // Behind '['.
  CharSet bracket() {
    const bool negated = take('^');
    CharSet narrow, wide;
    while (more() && peek() != ']') {
      bool single = true;
      const Class low = bracket_item(single);
      if (single && more() && peek() == '-' && at_ + 1 < text_.size() && text_[at_ + 1] != ']') {
        ++at_;
        const Class high = bracket_item(single);
        check(single, "pattern: a class ends a range at {}", at_);
        const uint32_t from = low.narrow.ranges()[0].low, to = high.narrow.ranges()[0].low;
        check(from <= to, "pattern: a range that runs backwards at {}", at_);
        narrow.add(from, to);
        wide.add(from, to);
        continue;
      }
      narrow.add(low.narrow);
      wide.add(low.wide);
    }
    check(take(']'), "pattern: a '[' is not closed");
    return negated ? wide.complement() : narrow;
  }

  Class bracket_item(bool& single) {
    if (!take('\\')) {
      const uint32_t code = code_point();
      return {{{code, code}}, {{code, code}}};
    }
    single = !more() || std::string_view("dDwWsS").find(peek()) == std::string_view::npos;
    return escape();
  }

  std::string_view text_;
  size_t at_ = 0;
};

class Writer {
 public:
  Writer(Grammar& g, Quoting quoting) : g_(g), quoting_(quoting) {}

  int32_t sequence(int32_t from, const Sequence& pieces) {
    for (const Piece& piece : pieces) from = repeated(from, piece);
    return from;
  }

  // Any text, at no matter what length.
  int32_t anything(int32_t from) {
    const int32_t loop = g_.add_node();
    g_.skip(from, loop);
    add_chars(g_, loop, loop, CharSet::all(), quoting_);
    return loop;
  }

 private:
  int32_t repeated(int32_t from, const Piece& piece) {
    for (int64_t i = 0; i < piece.least; ++i) from = once(from, piece);
    const int32_t out = g_.add_node();
    if (piece.most < 0) {
      const int32_t loop = g_.add_node();
      g_.skip(from, loop);
      g_.skip(once(loop, piece), loop);
      g_.skip(loop, out);
      return out;
    }
    for (int64_t i = piece.least; i < piece.most; ++i) {
      g_.skip(from, out);
      from = once(from, piece);
    }
    g_.skip(from, out);
    return out;
  }

  int32_t once(int32_t from, const Piece& piece) {
    const int32_t out = g_.add_node();
    if (piece.alternatives.empty()) {
      add_chars(g_, from, out, piece.set, quoting_);
    } else {
      for (const Sequence& alternative : piece.alternatives) {
        const int32_t begin = g_.add_node();
        g_.skip(from, begin);
        g_.skip(sequence(begin, alternative), out);
      }
    }
    return out;
  }

  Grammar& g_;
  Quoting quoting_;
};

}  // namespace

int32_t add_pattern(Grammar& g, int32_t from, std::string_view pattern, Quoting quoting) {
  const auto alternatives = Reader(pattern).whole();
  Writer writer(g, quoting);
  const int32_t out = g.add_node();
  for (const auto& alternative : alternatives) {
    int32_t at = g.add_node();
    g.skip(from, at);
    if (!alternative.from_start) at = writer.anything(at);
    at = writer.sequence(at, alternative.sequence);
    if (!alternative.to_end) at = writer.anything(at);
    g.skip(at, out);
  }
  return out;
}

}  // namespace godwit
