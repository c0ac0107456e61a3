// What token shards and media files share: a header of 64 bytes that ends with a checksum of itself, after it
// a body with a checksum in the header, whose areas begin at multiples of 8. `Header` has the members magic,
// version, checksum and, last, header_checksum.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "godwit/base/check.h"
#include "godwit/io/checksum.h"
#include "godwit/io/file.h"

namespace godwit::data {

inline constexpr size_t kHeaderBytes = 64;

inline uint64_t padded(uint64_t bytes) {
  return (bytes + 7) / 8 * 8;
}

template <class Header>
uint64_t header_checksum(const Header& header) {
  static_assert(sizeof(Header) == kHeaderBytes);
  return io::xxh3(std::as_bytes(std::span(&header, 1)).first(offsetof(Header, header_checksum)));
}

// The header goes to its place when the body is known.
class CheckedWriter {
 public:
  explicit CheckedWriter(io::fs::path path) : file_(std::move(path)) {
    constexpr std::byte kBlank[kHeaderBytes] = {};
    file_.append(kBlank);
  }

  const io::fs::path& path() const { return file_.path(); }
  void put(io::Bytes bytes) {
    checksum_.update(bytes);
    file_.append(bytes);
  }
  void pad(uint64_t area) {  // after an area of that many bytes
    constexpr std::byte kZeros[8] = {};
    put(std::span(kZeros).first(padded(area) - area));
  }
  // Adds magic and checksums, and ends the file. Returns the body's checksum.
  template <class Header>
  uint64_t finish(const char (&magic)[8], Header header) {
    header.checksum = checksum_.digest();
    std::memcpy(header.magic, magic, sizeof magic);
    header.header_checksum = header_checksum(header);
    file_.write_at(0, std::as_bytes(std::span(&header, 1)));
    file_.commit();
    return header.checksum;
  }

 private:
  io::AtomicFile file_;
  io::Xxh3 checksum_;
};

// The header of a file that is "a token shard". Its version is at most `newest`; counts are not looked at.
template <class Header>
Header read_header(const io::MappedFile& file, const char (&magic)[8], uint32_t newest,
                   std::string_view what) {
  const std::string where = file.path().string();
  Header header;
  check(file.size() >= sizeof header, "{}: {} bytes are too few for {}", where, file.size(), what);
  std::memcpy(&header, file.bytes().data(), sizeof header);
  check(std::equal(std::begin(magic), std::end(magic), header.magic), "{}: not {} (wrong magic)", where,
        what);
  check(header.version >= 1 && header.version <= newest, "{}: version {} of the format, expected {}", where,
        header.version, newest == 1 ? "1" : "1 to " + std::to_string(newest));
  check(header.header_checksum == header_checksum(header), "{}: the header is damaged (checksum)", where);
  return header;
}

// Reads everything after the header.
inline void verify_body(const io::MappedFile& file, uint64_t checksum) {
  const uint64_t found = io::xxh3(file.bytes().subspan(kHeaderBytes));
  check(found == checksum, "{}: damaged: checksum {}, expected {}", file.path().string(), io::hex64(found),
        io::hex64(checksum));
}

}  // namespace godwit::data
