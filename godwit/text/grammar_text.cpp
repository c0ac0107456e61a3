#include "godwit/text/grammar_text.h"

#include <algorithm>
#include <array>
#include <string>

#include "godwit/base/check.h"

namespace godwit {
namespace {

constexpr uint32_t kLastCode = 0x10ffff;
constexpr int64_t kMostCounted = 10000;

// Edges for the characters [low, high], which have `n` bytes each, as sequences of byte ranges
// (Thompson's UTF-8 construction: split where the lower bytes do not run through all their values).
void add_utf8(Grammar& g, int32_t from, int32_t to, uint32_t low, uint32_t high, int n) {
  if (n == 1) return g.edge(from, static_cast<int32_t>(low), static_cast<int32_t>(high), to);
  const uint32_t span = uint32_t{1} << (6 * (n - 1));  // characters below one leading byte
  const uint32_t mark = n == 2 ? 0xc0 : n == 3 ? 0xe0 : 0xf0;
  struct Part {
    int32_t from;
    uint32_t low, high;  // of the bits that are still to be written
    int n;
  };
  // Continuation bytes of `n` more, any value, to `to`; made once each.
  std::array<int32_t, 4> any = {to, -1, -1, -1};
  const auto any_behind = [&](int bytes) {
    for (int i = 1; i <= bytes; ++i) {
      if (any[i] >= 0) continue;
      any[i] = g.add_node();
      g.edge(any[i], 0x80, 0xbf, any[i - 1]);
    }
    return any[bytes];
  };
  std::vector<Part> parts;
  const auto split = [&](int32_t node, uint32_t a, uint32_t b, int bytes, uint32_t prefix) {
    const uint32_t width = uint32_t{1} << (6 * (bytes - 1));
    while (a <= b) {
      const uint32_t lead = a / width, top = b / width;
      if (a % width == 0 && (lead < top || b % width == width - 1)) {  // whole leading bytes
        const uint32_t last = b % width == width - 1 ? top : top - 1;
        g.edge(node, static_cast<int32_t>(prefix | lead), static_cast<int32_t>(prefix | last),
               any_behind(bytes - 1));
        a = (last + 1) * width;
        continue;
      }
      const uint32_t end = std::min(b, lead * width + width - 1);
      const int32_t next = g.add_node();
      g.edge(node, static_cast<int32_t>(prefix | lead), static_cast<int32_t>(prefix | lead), next);
      parts.push_back({next, a % width, end % width, bytes - 1});
      a = end + 1;
    }
  };
  check(span > 0 && low <= high, "an empty range of characters");
  split(from, low, high, n, mark);
  while (!parts.empty()) {
    const Part part = parts.back();
    parts.pop_back();
    if (part.n == 1) {
      g.edge(part.from, static_cast<int32_t>(0x80 | part.low), static_cast<int32_t>(0x80 | part.high), to);
    } else {
      split(part.from, part.low, part.high, part.n, 0x80);
    }
  }
}

void add_range(Grammar& g, int32_t from, int32_t to, uint32_t low, uint32_t high) {
  constexpr uint32_t kEnds[] = {0x7f, 0x7ff, 0xffff, kLastCode};
  for (int n = 1; n <= 4 && low <= high; ++n) {
    const uint32_t end = std::min(high, kEnds[n - 1]);
    if (low > end) continue;
    add_utf8(g, from, to, low, end, n);
    low = end + 1;
  }
}

// The hexadecimal digits that remain of \uXXXX, then `to`.
int32_t hex_digits(Grammar& g, int count, int32_t to) {
  for (int i = 0; i < count; ++i) {
    const int32_t node = g.add_node();
    g.edge(node, '0', '9', to);
    g.edge(node, 'a', 'f', to);
    g.edge(node, 'A', 'F', to);
    to = node;
  }
  return to;
}

// Every escape of a JSON string, from behind the backslash to `to`.
void add_escapes(Grammar& g, int32_t from, int32_t to) {
  for (const char c : std::string_view("\"\\/bfnrt")) g.edge(from, c, c, to);
  const int32_t one = hex_digits(g, 1, to), two = hex_digits(g, 1, one), three = hex_digits(g, 1, two);
  const int32_t code = g.add_node(), behind_d = g.add_node(), high = g.add_node();
  g.edge(from, 'u', 'u', code);
  g.edge(code, '0', '9', three);
  for (const auto& [low, top] :
       {std::pair('a', 'c'), std::pair('e', 'f'), std::pair('A', 'C'), std::pair('E', 'F')})
    g.edge(code, low, top, three);
  for (const char d : {'d', 'D'}) g.edge(code, d, d, behind_d);
  g.edge(behind_d, '0', '7', two);
  // A high surrogate, then a low one.
  const int32_t two_more = hex_digits(g, 2, high);
  g.edge(behind_d, '8', '9', two_more);
  g.edge(behind_d, 'a', 'b', two_more);
  g.edge(behind_d, 'A', 'B', two_more);
  const int32_t low_d = g.literal(high, "\\u"), low_c = g.add_node();
  for (const char d : {'d', 'D'}) g.edge(low_d, d, d, low_c);
  g.edge(low_c, 'c', 'f', two);
  g.edge(low_c, 'C', 'F', two);
}

}  // namespace

CharSet::CharSet(std::initializer_list<Range> ranges) {
  for (const Range& r : ranges) add(r.low, r.high);
}

void CharSet::add(uint32_t low, uint32_t high) {
  high = std::min(high, kLastCode);
  if (low > high) return;
  if (low <= 0xdfff && high >= 0xd800) {  // around the surrogates
    if (low < 0xd800) add(low, 0xd7ff);
    if (high > 0xdfff) add(0xe000, high);
    return;
  }
  ranges_.push_back({low, high});
  std::sort(ranges_.begin(), ranges_.end(), [](const Range& a, const Range& b) { return a.low < b.low; });
  std::vector<Range> merged;
  for (const Range& r : ranges_) {
    if (!merged.empty() && r.low <= merged.back().high + 1) {
      merged.back().high = std::max(merged.back().high, r.high);
    } else {
      merged.push_back(r);
    }
  }
  ranges_ = std::move(merged);
}

void CharSet::add(const CharSet& other) {
  for (const Range& r : other.ranges_) add(r.low, r.high);
}

CharSet CharSet::complement() const {
  CharSet out;
  uint32_t from = 0;
  for (const Range& r : ranges_) {
    if (r.low > from) out.add(from, r.low - 1);
    from = r.high + 1;
  }
  out.add(from, kLastCode);
  return out;
}

bool CharSet::contains(uint32_t code) const {
  return std::any_of(ranges_.begin(), ranges_.end(),
                     [&](const Range& r) { return r.low <= code && code <= r.high; });
}

void add_chars(Grammar& g, int32_t from, int32_t to, const CharSet& set, Quoting quoting) {
  if (quoting == Quoting::kRaw) {
    for (const auto& r : set.ranges()) add_range(g, from, to, r.low, r.high);
    return;
  }
  CharSet plain;
  constexpr uint32_t kBefore[] = {0x20, 0x23, 0x5d}, kAfter[] = {0x21, 0x5b, kLastCode};
  for (const auto& r : set.ranges()) {
    for (int i = 0; i < 3; ++i) plain.add(std::max(r.low, kBefore[i]), std::min(r.high, kAfter[i]));
  }
  for (const auto& r : plain.ranges()) add_range(g, from, to, r.low, r.high);
  int32_t escape = -1;
  const auto behind_backslash = [&] {
    if (escape < 0) escape = g.literal(from, "\\");
    return escape;
  };
  constexpr std::pair<uint32_t, char> kShort[] = {{'"', '"'},  {'\\', '\\'}, {'\b', 'b'}, {'\f', 'f'},
                                                  {'\n', 'n'}, {'\r', 'r'},  {'\t', 't'}};
  for (const auto& [code, letter] : kShort) {
    if (set.contains(code)) g.edge(behind_backslash(), letter, letter, to);
  }
  for (uint32_t code = 0; code < 0x20; ++code) {
    const bool has_short = std::any_of(std::begin(kShort), std::end(kShort),
                                       [&](const auto& entry) { return entry.first == code; });
    if (has_short || !set.contains(code)) continue;
    g.skip(g.literal(behind_backslash(), fmt::format("u{:04x}", code)), to);
  }
}

void add_any_text(Grammar& g, int32_t from, Quoting quoting) {
  if (quoting == Quoting::kRaw) return add_chars(g, from, from, CharSet::all(), quoting);
  const CharSet plain = {{0x20, 0x21}, {0x23, 0x5b}, {0x5d, kLastCode}};
  add_chars(g, from, from, plain, quoting);
  add_escapes(g, g.literal(from, "\\"), from);
}

int32_t add_counted_text(Grammar& g, int32_t from, int64_t least, int64_t most, Quoting quoting) {
  check(least >= 0 && (most < 0 || most >= least), "at least {} characters and at most {}", least, most);
  check(std::max(least, most) <= kMostCounted, "lengths above {} are not supported", kMostCounted);
  const int32_t one = g.add_rule("a character");
  const int32_t end = g.add_node();
  add_chars(g, g.start(one), end, CharSet({{0x20, 0x21}, {0x23, 0x5b}, {0x5d, kLastCode}}), quoting);
  if (quoting == Quoting::kJson) {
    add_escapes(g, g.literal(g.start(one), "\\"), end);
  } else {
    add_chars(g, g.start(one), end, CharSet({{0, 0x1f}, {'"', '"'}, {'\\', '\\'}}), quoting);
  }
  g.accept(end);
  for (int64_t i = 0; i < least; ++i) from = g.call(from, one);
  if (most < 0) {
    const int32_t loop = g.add_node();
    g.skip(from, loop);
    add_any_text(g, loop, quoting);
    return loop;
  }
  const int32_t out = g.add_node();
  for (int64_t i = least; i < most; ++i) {
    g.skip(from, out);
    from = g.call(from, one);
  }
  g.skip(from, out);
  return out;
}

std::string_view format_pattern(std::string_view format) {
#define GODWIT_DATE                                                                            \
  "[12][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]" \
  "[0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
#define GODWIT_TIME \
  "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
#define GODWIT_HOST "[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?(?:\\.[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?){1,4}"
  constexpr std::pair<std::string_view, std::string_view> kFormats[] = {
      {"date", "^" GODWIT_DATE "$"},
      {"time", "^" GODWIT_TIME "$"},
      {"date-time", "^" GODWIT_DATE "T" GODWIT_TIME "$"},
      {"duration",
       "^P(?:[0-9]{1,4}W|(?:[0-9]{1,4}Y(?:[0-9]{1,4}M(?:[0-9]{1,4}D)?)?|[0-9]{1,4}M(?:[0-9]{1,4}D)?|[0-9]{1,"
       "4}D)"
       "(?:T(?:[0-9]{1,4}H(?:[0-9]{1,4}M(?:[0-9]{1,4}S)?)?|[0-9]{1,4}M(?:[0-9]{1,4}S)?|[0-9]{1,4}S))?)$"},
      {"email", "^[A-Za-z0-9_+-]{1,32}(?:\\.[A-Za-z0-9_+-]{1,16}){0,3}@" GODWIT_HOST "$"},
      {"hostname", "^" GODWIT_HOST "$"},
      {"ipv4",
       "^(?:(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\\.){3}(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
       "$"},
      {"ipv6",
       "^(?:(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4}|(?:[0-9a-f]{1,4}:){1,6}:[0-9a-f]{1,4}|::[0-9a-f]{1,4})$"},
      {"uuid", "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"},
  };
#undef GODWIT_DATE
#undef GODWIT_TIME
#undef GODWIT_HOST
  for (const auto& [name, pattern] : kFormats) {
    if (name == format) return pattern;
  }
  return {};
}

}  // namespace godwit
