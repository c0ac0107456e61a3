// XXH3, 64 bits: finds damaged files, not forged ones. Written as 16 hexadecimal digits.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "godwit/io/file.h"

namespace godwit::io {

uint64_t xxh3(Bytes bytes);
inline uint64_t xxh3(std::string_view text) {
  return xxh3(as_bytes(text));
}

// The same value over pieces.
class Xxh3 {
 public:
  Xxh3();
  ~Xxh3();
  void update(Bytes bytes);
  uint64_t digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

uint64_t xxh3_file(const fs::path& path);

std::string hex64(uint64_t value);
// Throws an Error that begins with `where` unless `text` is 16 hexadecimal digits.
uint64_t parse_hex64(std::string_view text, std::string_view where);

}  // namespace godwit::io
