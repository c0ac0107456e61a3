// What python/make_tokenizer_fixtures.py wrote, and the rules by which it makes long texts.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "godwit/base/file.h"
#include "godwit/base/rng.h"
#include "godwit/text/tokenizer.h"
#include "godwit/text/utf8.h"

namespace godwit {

inline const std::string kFixture = GODWIT_FIXTURES "/tokenizer";

inline const nlohmann::json& fixture() {
  static const auto cases = nlohmann::json::parse(read_file(kFixture + "/cases.json"));
  return cases;
}

inline const Tokenizer& fixture_tokenizer() {
  static const Tokenizer tokenizer = Tokenizer::load(kFixture);
  return tokenizer;
}

// FNV-1a over 4-byte little-endian numbers.
class Fnv {
 public:
  void add(uint32_t number) {
    for (int shift = 0; shift < 32; shift += 8) value_ = (value_ ^ (number >> shift & 0xff)) * 0x100000001b3;
  }
  std::string hex() const { return fmt::format("{:016x}", value_); }

 private:
  uint64_t value_ = 0xcbf29ce484222325;
};

inline std::string fnv(std::span<const int32_t> ids) {
  Fnv hash;
  for (const int32_t id : ids) hash.add(static_cast<uint32_t>(id));
  return hash.hex();
}

// pool_text of the script.
inline std::string pool_text(uint64_t seed, uint64_t stream, uint64_t length) {
  static const auto pool = fixture()["pool"].get<std::vector<std::string>>();
  std::string text;
  const std::string* last = nullptr;
  for (uint64_t i = 0; i < length; ++i) {
    const uint64_t bits = random_bits(seed, stream, i);
    if (!last || bits % 4 != 0) last = &pool[(bits >> 8) % pool.size()];
    text += *last;
  }
  return text;
}

// planes_text of the script.
inline std::string planes_text(uint64_t seed, uint64_t length) {
  std::string text;
  for (uint64_t i = 0; i < length; ++i) {
    const uint64_t bits = random_bits(seed, 0, i);
    const auto code = static_cast<uint32_t>((bits >> 8) % (bits % 2 == 0 ? 0x3000 : 0x110000 - 0x800));
    append_utf8(code < 0xd800 ? code : code + 0x800, text);
  }
  return text;
}

inline std::string rule_text(const nlohmann::json& rule) {
  if (rule.contains("pool")) return pool_text(rule["pool"], /*stream=*/0, rule["length"]);
  if (rule.contains("planes")) return planes_text(rule["planes"], rule["length"]);
  std::string text;
  for (const auto& part : rule["repeat"]) {
    for (int i = 0; i < part[1].get<int>(); ++i) text += part[0].get_ref<const std::string&>();
  }
  return text;
}

inline std::string from_hex(const std::string& hex) {
  std::string bytes;
  for (size_t i = 0; i < hex.size(); i += 2)
    bytes.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  return bytes;
}

inline std::string random_bytes(uint64_t seed, size_t length) {
  std::string bytes;
  for (size_t i = 0; i < length; ++i) bytes.push_back(static_cast<char>(random_bits(seed, 0, i)));
  return bytes;
}

}  // namespace godwit
