// Numbers as parts of a grammar, digit by digit.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "godwit/text/grammar.h"

namespace godwit {

// A decimal number, exactly: sign, digits without leading zeros ("0" at least), digits behind the point
// without trailing zeros.
struct Decimal {
  bool negative = false;
  std::string whole = "0";
  std::string fraction = {};
};
// Of the text of a number without exponent.
Decimal parse_decimal(const std::string& text);

struct NumberRange {
  std::optional<Decimal> low = {}, high = {};
  bool low_inclusive = true, high_inclusive = true;
  bool integer = true;   // no point and no exponent
  int64_t multiple = 1;  // integers: of this
};

// Without limits: JSON numbers of up to 18 digits before the point, 17 behind it and two of an exponent.
int32_t add_any_number(Grammar& g, int32_t from, bool integer);

// The numbers of a range, without exponent; gives the node behind. They have up to 15 digits, so
// that a reader's rounding to a double cannot carry them over a limit; integers as many as their limits.
int32_t add_number_range(Grammar& g, int32_t from, const NumberRange& range);

}  // namespace godwit
