#include "godwit/serve/image_url.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>

#include "godwit/base/file.h"
#include "godwit/serve/protocol.h"

namespace godwit::serve {
namespace {

namespace fs = std::filesystem;

constexpr uintmax_t kLargestFile = uintmax_t{64} << 20;

[[noreturn]] void refuse(const std::string& where, const std::string& what) {
  throw ApiError(400, fmt::format("{}: {}", where, what), "messages");
}

// A file of `directory`, links followed, or a refusal: what lies outside is not told apart from what is not
// there.
std::string file_bytes(std::string_view name, const std::string& where, const std::string& directory) {
  if (name.starts_with("//localhost/")) name.remove_prefix(11);
  if (name.starts_with("///")) name.remove_prefix(2);
  std::error_code ec;
  const fs::path root = fs::canonical(directory, ec);
  if (ec) refuse(where, "the directory of images is not there");
  const fs::path path = fs::canonical(root / fs::path(name), ec);  // an absolute name replaces the root
  const auto [end, ignored] = std::mismatch(root.begin(), root.end(), path.begin(), path.end());
  if (ec || end != root.end() || !fs::is_regular_file(path, ec))
    refuse(where, "there is no such file in the directory of images");
  if (fs::file_size(path, ec) > kLargestFile)
    refuse(where, fmt::format("the file is larger than {} bytes", kLargestFile));
  return read_file(path);
}

}  // namespace

bool decode_base64(std::string_view text, std::string& out) {
  static constexpr auto kValues = [] {
    std::array<int8_t, 256> values{};
    values.fill(-1);
    constexpr std::string_view kLetters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < kLetters.size(); ++i)
      values[static_cast<unsigned char>(kLetters[i])] = static_cast<int8_t>(i);
    return values;
  }();
  out.clear();
  out.reserve(text.size() / 4 * 3);
  uint32_t bits = 0;
  int count = 0;  // of bits that wait
  size_t letters = 0, padding = 0;
  for (const char c : text) {
    if (c == '\r' || c == '\n') continue;
    if (c == '=') {
      ++padding;
      continue;
    }
    const int value = kValues[static_cast<unsigned char>(c)];
    if (value < 0 || padding > 0) return false;
    ++letters;
    bits = (bits << 6 | static_cast<uint32_t>(value)) & 0xffffff;
    count += 6;
    if (count >= 8) {
      count -= 8;
      out += static_cast<char>(bits >> count & 0xff);
    }
  }
  return letters % 4 != 1 && padding <= 2 && (padding == 0 || (letters + padding) % 4 == 0);
}

std::string image_bytes(const std::string& url, const std::string& where, const std::string& directory) {
  constexpr std::string_view kData = "data:", kFile = "file:";
  if (url.starts_with(kFile)) {
    if (directory.empty()) refuse(where, "this server reads no files; send the picture as a data URL");
    return file_bytes(std::string_view(url).substr(kFile.size()), where, directory);
  }
  if (!url.starts_with(kData))
    refuse(where, "a data URL (data:image/png;base64,...) is needed; this server fetches nothing");
  const size_t comma = url.find(',');
  const std::string_view kind =
      std::string_view(url).substr(kData.size(), std::min(comma, url.size()) - kData.size());
  if (comma == std::string::npos || !kind.ends_with(";base64"))
    refuse(where, "a data URL must hold base64: data:image/png;base64,...");
  std::string out;
  if (!decode_base64(std::string_view(url).substr(comma + 1), out))
    refuse(where, "what follows base64, is no base64");
  return out;
}

}  // namespace godwit::serve
