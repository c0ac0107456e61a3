#include "godwit/serve/image_url.h"

#include <algorithm>
#include <filesystem>
#include <string_view>
#include <utility>

#include "godwit/base/file.h"
#include "godwit/io/base64.h"
#include "godwit/serve/api_error.h"

namespace godwit::serve {
namespace {

namespace fs = std::filesystem;

constexpr uintmax_t kLargestFile = uintmax_t{64} << 20;

[[noreturn]] void refuse(const std::string& where, const std::string& what) {
  throw ApiError(400, fmt::format("{}: {}", where, what), where);
}

// A file of `directory`, links followed, or a refusal: what lies outside is not told apart from what is not
// there.
std::string file_bytes(std::string_view name, const std::string& where, const std::string& directory) {
  if (name.find('\0') != name.npos) refuse(where, "a file's name holds no zero byte");
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

std::string image_bytes(const std::string& url, const std::string& where, const std::string& directory) {
  constexpr std::string_view kFile = "file:";
  if (url.starts_with(kFile)) {
    if (directory.empty()) refuse(where, "this server reads no files; send the picture as a data URL");
    return file_bytes(std::string_view(url).substr(kFile.size()), where, directory);
  }
  const auto bytes = client_error("messages", [&] { return io::decode_data_url(url, where); });
  if (!bytes) refuse(where, "a data URL (data:image/png;base64,...) is needed; this server fetches nothing");
  return *bytes;
}

}  // namespace godwit::serve
