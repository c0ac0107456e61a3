#include "godwit/text/rank_file.h"

#include <array>
#include <charconv>
#include <cstdint>
#include <unordered_map>

#include "godwit/base/check.h"

namespace godwit {
namespace {

constexpr std::string_view kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

constexpr std::array<int8_t, 256> kSextets = [] {
  std::array<int8_t, 256> sextets{};
  sextets.fill(-1);
  for (size_t i = 0; i < kAlphabet.size(); ++i) {
    sextets[static_cast<uint8_t>(kAlphabet[i])] = static_cast<int8_t>(i);
  }
  return sextets;
}();

// RFC 4648 with padding. False if `text` is anything else.
bool decode_base64(std::string_view text, std::string& out) {
  out.clear();
  if (text.empty() || text.size() % 4 != 0) return false;
  const size_t padding = text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0;
  uint32_t bits = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool is_padding = i >= text.size() - padding;
    const int sextet = is_padding ? 0 : kSextets[static_cast<uint8_t>(text[i])];
    if (sextet < 0) return false;
    bits = bits << 6 | static_cast<uint32_t>(sextet);
    if (i % 4 != 3) continue;
    for (int shift = 16; shift >= 0; shift -= 8) out.push_back(static_cast<char>(bits >> shift & 0xff));
    bits = 0;
  }
  for (size_t i = out.size() - padding; i < out.size(); ++i) {
    if (out[i] != 0) return false;  // bits of the last letter that belong to no byte
  }
  out.resize(out.size() - padding);
  return true;
}

void append_base64(std::string_view bytes, std::string& out) {
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t bits = 0;
    const size_t n = std::min<size_t>(3, bytes.size() - i);
    for (size_t j = 0; j < 3; ++j) bits = bits << 8 | (j < n ? static_cast<uint8_t>(bytes[i + j]) : 0);
    for (size_t j = 0; j < 4; ++j) out.push_back(j <= n ? kAlphabet[bits >> (18 - 6 * j) & 63] : '=');
  }
}

std::string shown(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) {
    const auto byte = static_cast<uint8_t>(c);
    out += byte >= 0x20 && byte < 0x7f && c != '\\' ? std::string(1, c) : fmt::format("\\x{:02x}", byte);
  }
  return out;
}

struct Line {
  std::string token;
  size_t number = 0;  // from 1; 0: this rank has no line yet
};

}  // namespace

std::vector<std::string> parse_ranks(std::string_view content, const std::string& name) {
  check(!content.empty(), "{}: the file is empty, expected lines of 'base64 rank'", name);
  std::vector<Line> by_rank;
  size_t number = 0;
  std::string token;
  while (!content.empty()) {
    ++number;
    const size_t newline = content.find('\n');
    const std::string_view line = content.substr(0, newline);
    content.remove_prefix(newline == std::string_view::npos ? content.size() : newline + 1);
    if (line.empty()) continue;
    const size_t space = line.find(' ');
    check(space != std::string_view::npos, "{}:{}: expected 'base64 rank', found no rank: '{}'", name, number,
          shown(line.substr(0, 60)));
    check(decode_base64(line.substr(0, space), token), "{}:{}: invalid base64 '{}'", name, number,
          shown(line.substr(0, space).substr(0, 60)));
    const std::string_view digits = line.substr(space + 1);
    size_t rank = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), rank);
    check(error == std::errc() && end == digits.data() + digits.size() && rank < (1u << 30),
          "{}:{}: invalid rank '{}'", name, number, shown(digits.substr(0, 60)));
    // No line is shorter than 7 bytes, so a rank above this leaves a gap; it must not make the table huge.
    check(rank <= number + content.size() / 7,
          "{}:{}: rank {} is above the number of lines: ranks are missing", name, number, rank);
    if (rank >= by_rank.size()) by_rank.resize(rank + 1);
    check(by_rank[rank].number == 0, "{}:{}: rank {} is already on line {}", name, number, rank,
          by_rank[rank].number);
    by_rank[rank] = {token, number};
  }
  std::unordered_map<std::string_view, size_t> lines;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    check(by_rank[rank].number != 0,
          "{}: rank {} is missing (ranks go up to {}, {} lines): truncated or corrupt", name, rank,
          by_rank.size() - 1, number);
    const auto [first, inserted] = lines.emplace(by_rank[rank].token, by_rank[rank].number);
    check(inserted, "{}:{}: token '{}' is already on line {}", name, by_rank[rank].number,
          shown(by_rank[rank].token), first->second);
  }
  std::vector<std::string> tokens;
  tokens.reserve(by_rank.size());
  for (int byte = 0; byte < 256; ++byte) {
    const char c = static_cast<char>(byte);
    check(lines.contains(std::string_view(&c, 1)),
          "{}: no token for the single byte 0x{:02x}: truncated or corrupt", name, byte);
  }
  for (Line& line : by_rank) tokens.push_back(std::move(line.token));
  return tokens;
}

std::string format_ranks(const std::vector<std::string>& tokens) {
  std::string out;
  for (size_t rank = 0; rank < tokens.size(); ++rank) {
    append_base64(tokens[rank], out);
    out += fmt::format(" {}\n", rank);
  }
  return out;
}

}  // namespace godwit
