#include "godwit/data/tar.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>

#include "godwit/base/check.h"

namespace godwit::data {
namespace {

constexpr size_t kBlock = 512;

std::string_view field(std::string_view header, size_t at, size_t size) {
  const std::string_view text = header.substr(at, size);
  return text.substr(0, text.find('\0'));
}

// Octal digits between blanks.
std::optional<uint64_t> octal(std::string_view text) {
  while (text.starts_with(' ')) text.remove_prefix(1);
  while (text.ends_with(' ')) text.remove_suffix(1);
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 8);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// The sum of the header's bytes, its own field taken as blanks.
bool checksum_holds(std::string_view header) {
  uint64_t sum = 0;
  for (size_t i = 0; i < kBlock; ++i)
    sum += i >= 148 && i < 156 ? ' ' : static_cast<unsigned char>(header[i]);
  return octal(field(header, 148, 8)) == sum;
}

// "path" of a pax header: records "LENGTH KEY=VALUE\n".
std::string pax_path(std::string_view records) {
  while (!records.empty()) {
    size_t length = 0;
    const auto [end, error] = std::from_chars(records.data(), records.data() + records.size(), length);
    if (error != std::errc() || length == 0 || length > records.size()) return {};
    const std::string_view record = records.substr(0, length);
    const size_t key = static_cast<size_t>(end - records.data()) + 1;
    if (key < length && record.substr(key).starts_with("path=")) {
      const std::string_view value = record.substr(key + 5);
      return std::string(value.substr(0, value.size() - 1));
    }
    records.remove_prefix(length);
  }
  return {};
}

}  // namespace

void read_tar(const io::fs::path& path, const TarMemberFn& visit) {
  const io::MappedFile file(path);
  const std::string where = path.string();
  const std::string_view all = io::as_text(file.bytes());
  std::string long_name;
  for (size_t at = 0; at < all.size();) {
    check(all.size() - at >= kBlock, "{}: the archive ends in the middle of a header: truncated?", where);
    const std::string_view header = all.substr(at, kBlock);
    if (std::ranges::all_of(header, [](char c) { return c == '\0'; })) return;  // the archive's end
    check(checksum_holds(header), "{}: no tar header at byte {} (checksum)", where, at);
    const std::optional<uint64_t> size = octal(field(header, 124, 12));
    check(size && *size <= all.size() - at - kBlock, "{}: the member at byte {} goes past the archive's end",
          where, at);
    const std::string_view body = all.substr(at + kBlock, *size);
    at = std::min<size_t>(at + kBlock + (*size + kBlock - 1) / kBlock * kBlock, all.size());
    const char type = header[156];
    if (type == 'L') {
      long_name = std::string(body.substr(0, body.find('\0')));
    } else if (type == 'x') {
      if (std::string name = pax_path(body); !name.empty()) long_name = std::move(name);
    } else {
      std::string name(field(header, 0, 100));
      const std::string_view prefix = header.substr(257, 5) == "ustar" ? field(header, 345, 155) : "";
      if (!prefix.empty()) name = std::string(prefix) + "/" + name;
      if (!long_name.empty()) name = std::move(long_name);
      long_name.clear();
      if (type == '0' || type == '\0') visit(name, io::as_bytes(body), at);
    }
  }
}

}  // namespace godwit::data
