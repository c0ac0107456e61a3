#include "godwit/io/base64.h"

#include <algorithm>
#include <array>
#include <cstdint>

#include "godwit/base/check.h"

namespace godwit::io {
namespace {

constexpr std::string_view kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
constexpr std::string_view kBlanks = " \t\r\n";

constexpr std::array<int8_t, 256> kValues = [] {
  std::array<int8_t, 256> values{};
  values.fill(-1);
  for (size_t i = 0; i < kAlphabet.size(); ++i)
    values[static_cast<unsigned char>(kAlphabet[i])] = static_cast<int8_t>(i);
  return values;
}();

}  // namespace

std::string decode_base64(std::string_view text, const std::string& where) {
  std::string out;
  out.reserve(text.size() / 4 * 3);
  uint32_t bits = 0;
  int held = 0;  // bits not yet written
  size_t digits = 0, padding = 0;
  for (const char c : text) {
    if (kBlanks.find(c) != std::string_view::npos) continue;
    if (c == '=') {
      ++padding;
      continue;
    }
    const int8_t value = kValues[static_cast<unsigned char>(c)];
    check(value >= 0 && padding == 0, "{}: not valid base64", where);
    bits = bits << 6 | static_cast<uint32_t>(value);
    held += 6;
    ++digits;
    if (held < 8) continue;
    held -= 8;
    out.push_back(static_cast<char>(bits >> held & 0xFF));
  }
  // One digit alone holds no byte; what padding there is fills up the last four.
  check(digits % 4 != 1 && padding <= 2 && (padding == 0 || (digits + padding) % 4 == 0),
        "{}: not valid base64", where);
  return out;
}

std::string encode_base64(std::string_view bytes) {
  std::string out;
  out.reserve((bytes.size() + 2) / 3 * 4);
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t bits = 0;
    for (size_t k = 0; k < 3; ++k)
      bits = bits << 8 | (i + k < bytes.size() ? static_cast<unsigned char>(bytes[i + k]) : 0U);
    const size_t held = std::min<size_t>(bytes.size() - i, 3);
    for (size_t k = 0; k < 4; ++k) out += k <= held ? kAlphabet[bits >> (18 - 6 * k) & 63U] : '=';
  }
  return out;
}

std::optional<std::string> decode_data_url(std::string_view url, const std::string& where) {
  if (!url.starts_with("data:")) return std::nullopt;
  const size_t comma = url.find(',');
  check(comma != std::string_view::npos && url.substr(0, comma).ends_with(";base64"),
        "{}: a data URL must be base64: data:image/png;base64,...", where);
  return decode_base64(url.substr(comma + 1), where);
}

}  // namespace godwit::io
