#include "godwit/base/file.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "godwit/base/check.h"

namespace godwit {
namespace {

struct Close {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, Close>;

}  // namespace

std::string read_file(const std::string& path) {
  File file(std::fopen(path.c_str(), "rb"));
  check(file != nullptr, "{}: cannot open: {}", path, std::strerror(errno));
  struct stat info {};
  check(fstat(fileno(file.get()), &info) == 0, "{}: cannot stat: {}", path, std::strerror(errno));
  check(!S_ISDIR(info.st_mode), "{}: is a directory, expected a file", path);
  // A terminal's input ends; /dev/zero does not.
  check(!S_ISCHR(info.st_mode) || isatty(fileno(file.get())) != 0 || info.st_rdev == makedev(1, 3),
        "{}: is a device, expected a file", path);
  std::string bytes(S_ISREG(info.st_mode) ? static_cast<size_t>(info.st_size) : 0, '\0');
  bytes.resize(std::fread(bytes.data(), 1, bytes.size(), file.get()));
  // A pipe has no size, and a file may have grown since.
  char more[1 << 16];
  while (const size_t n = std::fread(more, 1, sizeof more, file.get())) bytes.append(more, n);
  check(std::ferror(file.get()) == 0, "{}: read failed: {}", path, std::strerror(errno));
  return bytes;
}

std::string read_regular_file(const std::string& path) {
  struct stat info {};
  const int found = stat(path.c_str(), &info);
  check(found == 0, "{}: cannot open: {}", path, std::strerror(errno));
  check(!S_ISDIR(info.st_mode), "{}: is a directory, expected a file", path);
  check(S_ISREG(info.st_mode), "{}: is no regular file", path);
  return read_file(path);
}

void write_file(const std::string& path, std::string_view bytes) {
  const std::string beside = fmt::format("{}.tmp-{}", path, getpid());
  std::FILE* file = std::fopen(beside.c_str(), "wb");
  check(file != nullptr, "{}: cannot create: {}", beside, std::strerror(errno));
  bool ok = std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size();
  ok = std::fclose(file) == 0 && ok;  // a full disk may only show at close
  ok = ok && std::rename(beside.c_str(), path.c_str()) == 0;
  if (!ok) {
    const int reason = errno;
    std::remove(beside.c_str());
    fail("{}: cannot write: {}", path, std::strerror(reason));
  }
}

}  // namespace godwit
