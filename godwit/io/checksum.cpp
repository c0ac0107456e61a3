#include "godwit/io/checksum.h"

#define XXH_INLINE_ALL  // the header alone is enough: no library to link
#include <xxhash.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <span>
#include <vector>

#include "godwit/base/check.h"

namespace godwit::io {
namespace {

constexpr size_t kPiece = size_t{4} << 20;

}  // namespace

struct Xxh3::State {
  XXH3_state_t xxh;  // 64-byte aligned by its own attribute, which new respects
};

Xxh3::Xxh3() : state_(std::make_unique<State>()) {
  XXH3_64bits_reset(&state_->xxh);
}
Xxh3::~Xxh3() = default;
void Xxh3::update(Bytes bytes) {
  XXH3_64bits_update(&state_->xxh, bytes.data(), bytes.size());
}
uint64_t Xxh3::digest() const {
  return XXH3_64bits_digest(&state_->xxh);
}

uint64_t xxh3(Bytes bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

uint64_t xxh3_file(const fs::path& path) {
  // In pieces, not mapped: a map of a checkpoint would count as memory of this process.
  std::ifstream in(path, std::ios::binary);
  check(in.good(), "{}: cannot be opened: {}", path.string(), std::strerror(errno));
  std::vector<char> buffer(kPiece);
  Xxh3 hash;
  while (in) {
    in.read(buffer.data(), static_cast<std::streamsize>(buffer.size()));
    hash.update(std::as_bytes(std::span(buffer.data(), static_cast<size_t>(in.gcount()))));
  }
  check(in.eof(), "{}: cannot be read: {}", path.string(), std::strerror(errno));
  return hash.digest();
}

std::string hex64(uint64_t value) {
  return fmt::format("{:016x}", value);
}

uint64_t parse_hex64(std::string_view text, std::string_view where) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  check(error == std::errc() && end == text.data() + text.size() && text.size() == 16,
        "{}: expected 16 hexadecimal digits, got '{}'", where, text);
  return value;
}

}  // namespace godwit::io
