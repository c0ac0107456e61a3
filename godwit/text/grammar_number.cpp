#include "godwit/text/grammar_number.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "godwit/base/check.h"

namespace godwit {
namespace {

constexpr int kIntegerDigits = 18;   // fits in 64 bits
constexpr int kFractionDigits = 17;  // of a number without limits
constexpr int kDoubleDigits = 15;    // decimals of so many digits are different doubles
constexpr int64_t kMostMultiple = 1000;

// A limit on the size of a number, its sign aside.
struct Limit {
  Decimal value;
  bool inclusive = true;
};

bool is_zero(const Decimal& d) {
  return d.whole == "0" && d.fraction.empty();
}

// Numbers of [low, high], both not negative, by the digits that have been read. While what was read equals
// the beginning of a limit, that limit still binds: `low_binds`, `high_binds`.
class Digits {
 public:
  Digits(Grammar& g, const Limit& low, const std::optional<Limit>& high, int whole_digits,
         int fraction_digits, int64_t multiple)
      : g_(g),
        low_(low),
        high_(high),
        fraction_digits_(fraction_digits),
        multiple_(multiple),
        out_(g.add_node()) {
    most_ = whole_digits;
    if (high) most_ = std::min<int>(most_, static_cast<int>(high->value.whole.size()));
  }

  int32_t add(int32_t from) {
    const auto least = static_cast<int>(low_.value.whole.size());
    for (int digits = least; digits <= most_; ++digits) {
      const bool high_binds = high_ && digits == static_cast<int>(high_->value.whole.size());
      const int32_t begin = g_.add_node();
      g_.skip(from, begin);
      digit(begin, digits, {digits == least, high_binds, 0}, /*first=*/digits > 1);
    }
    return out_;
  }

 private:
  struct Seen {
    bool low_binds, high_binds;
    int64_t rest;  // modulo multiple_
    auto operator<=>(const Seen&) const = default;
  };

  static int digit_at(const std::string& digits, size_t i) { return i < digits.size() ? digits[i] - '0' : 0; }

  // Edges for the next of `left` digits before the point.
  void digit(int32_t node, int left, const Seen& seen, bool first) {
    int from = first ? 1 : 0, to = 9;
    if (seen.low_binds) from = std::max(from, digit_at(low_.value.whole, low_.value.whole.size() - left));
    const int top = seen.high_binds ? digit_at(high_->value.whole, high_->value.whole.size() - left) : 9;
    to = std::min(to, top);
    for (int d = from; d <= to; ++d) {
      const bool low_binds =
          seen.low_binds && d == digit_at(low_.value.whole, low_.value.whole.size() - left);
      const Seen next{low_binds, seen.high_binds && d == top, (seen.rest * 10 + d) % multiple_};
      g_.edge(node, '0' + d, '0' + d, whole(left - 1, next));
    }
  }

  // The node with `left` digits to come before the point.
  int32_t whole(int left, const Seen& seen) {
    const auto [it, added] = whole_.try_emplace({left, seen}, -1);
    if (!added) return it->second;
    const int32_t node = it->second = g_.add_node();
    if (left > 0) {
      digit(node, left, seen, /*first=*/false);
      return node;
    }
    end(node, 0, seen);
    if (fraction_digits_ > 0) g_.edge(node, '.', '.', fraction(0, seen));
    return node;
  }

  // The node with `read` digits behind the point.
  int32_t fraction(int read, const Seen& seen) {
    const auto [it, added] = fraction_.try_emplace({read, seen}, -1);
    if (!added) return it->second;
    const int32_t node = it->second = g_.add_node();
    if (read > 0) end(node, read, seen);
    if (read == fraction_digits_) return node;
    const int bottom = seen.low_binds ? digit_at(low_.value.fraction, read) : 0;
    const int top = seen.high_binds ? digit_at(high_->value.fraction, read) : 9;
    for (int d = bottom; d <= top; ++d)
      g_.edge(node, '0' + d, '0' + d,
              fraction(read + 1, {seen.low_binds && d == bottom, seen.high_binds && d == top, 0}));
    return node;
  }

  // The number may end here, if it lies within the limits. `read`: digits behind the point.
  void end(int32_t node, size_t read, const Seen& seen) {
    if (seen.rest != 0) return;
    if (seen.low_binds && (read < low_.value.fraction.size() || !low_.inclusive)) return;
    if (seen.high_binds && read >= high_->value.fraction.size() && !high_->inclusive) return;
    g_.skip(node, out_);
  }

  Grammar& g_;
  const Limit& low_;
  const std::optional<Limit>& high_;
  int fraction_digits_;
  int64_t multiple_;
  int32_t out_;
  int most_ = 0;
  std::map<std::pair<int, Seen>, int32_t> whole_, fraction_;
};

}  // namespace

Decimal parse_decimal(const std::string& text) {
  Decimal out;
  size_t at = 0;
  if (at < text.size() && text[at] == '-') {
    out.negative = true;
    ++at;
  }
  const size_t point = std::min(text.find('.', at), text.size());
  out.whole = text.substr(at, point - at);
  out.whole.erase(0, std::min(out.whole.find_first_not_of('0'), out.whole.size()));
  if (out.whole.empty()) out.whole = "0";
  if (point < text.size()) out.fraction = text.substr(point + 1);
  while (!out.fraction.empty() && out.fraction.back() == '0') out.fraction.pop_back();
  const auto digits = [](const std::string& s) {
    return s.find_first_not_of("0123456789") == std::string::npos;
  };
  check(digits(out.whole) && digits(out.fraction), "'{}' is no decimal number", text);
  if (is_zero(out)) out.negative = false;
  return out;
}

int32_t add_any_number(Grammar& g, int32_t from, bool integer) {
  const auto up_to = [&](int32_t node, int most, int32_t out) {  // that many digits more, or fewer
    for (int i = 0; i < most; ++i) {
      const int32_t next = g.add_node();
      g.skip(node, out);
      g.edge(node, '0', '9', next);
      node = next;
    }
    g.skip(node, out);
  };
  const int32_t whole = g.add_node(), digits = g.add_node(), behind_whole = g.add_node(), out = g.add_node();
  g.skip(from, whole);
  g.edge(from, '-', '-', whole);
  g.edge(whole, '0', '0', behind_whole);
  g.edge(whole, '1', '9', digits);
  up_to(digits, kIntegerDigits - 1, behind_whole);
  g.skip(behind_whole, out);
  if (integer) return out;
  const int32_t point = g.literal(behind_whole, "."), first = g.add_node(), behind_fraction = g.add_node();
  g.edge(point, '0', '9', first);
  up_to(first, kFractionDigits - 1, behind_fraction);
  g.skip(behind_fraction, out);
  const int32_t sign = g.add_node(), exponent = g.add_node(), last = g.add_node();
  for (const int32_t node : {behind_whole, behind_fraction}) {
    for (const char e : {'e', 'E'}) g.edge(node, e, e, sign);
  }
  for (const char c : {'+', '-'}) g.edge(sign, c, c, exponent);
  g.skip(sign, exponent);
  g.edge(exponent, '0', '9', last);
  up_to(last, 1, out);
  return out;
}

int32_t add_number_range(Grammar& g, int32_t from, const NumberRange& range) {
  check(range.multiple >= 1 && range.multiple <= kMostMultiple,
        "multipleOf: only whole numbers from 1 to {} are supported", kMostMultiple);
  const auto size = [](const std::optional<Decimal>& d, int otherwise) {
    return d ? static_cast<int>(d->whole.size()) : otherwise;
  };
  int whole = std::max({kDoubleDigits, size(range.low, 0), size(range.high, 0)}), fraction = 0;
  if (!range.integer) {
    whole = std::min(std::max(size(range.low, 9), size(range.high, 9)), kDoubleDigits);
    fraction = std::min(12, kDoubleDigits - whole);
  }
  const int32_t out = g.add_node();
  // Not below zero.
  if (!range.high || !range.high->negative) {
    const Limit low = range.low && !range.low->negative ? Limit{*range.low, range.low_inclusive} : Limit{};
    std::optional<Limit> high;
    if (range.high) high = Limit{*range.high, range.high_inclusive};
    g.skip(Digits(g, low, high, whole, fraction, range.multiple).add(from), out);
  }
  // Below zero: the limits change places.
  if (!range.low || range.low->negative) {
    const bool near = range.high && (range.high->negative || is_zero(*range.high));
    const Limit low = near ? Limit{*range.high, range.high_inclusive} : Limit{};
    std::optional<Limit> high;
    if (range.low) high = Limit{*range.low, range.low_inclusive};
    const int32_t minus = g.literal(from, "-");
    g.skip(Digits(g, low, high, whole, fraction, range.multiple).add(minus), out);
  }
  return out;
}

}  // namespace godwit
