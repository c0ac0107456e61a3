#include "godwit/io/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <system_error>
#include <utility>
#include <vector>

#include "godwit/base/check.h"

namespace godwit::io {
namespace {

constexpr size_t kBuffer = 1 << 20;
constexpr size_t kLargestWrite = 1 << 30;  // one write(2) moves at most 2 GiB - 4 KiB

std::string reason(int error) {
  return std::generic_category().message(error);
}

class Descriptor {
 public:
  Descriptor(const fs::path& path, int flags) : fd_(::open(path.c_str(), flags | O_CLOEXEC)) {
    if (fd_ < 0) fail("cannot open {}: {}", path.string(), reason(errno));
  }
  ~Descriptor() { ::close(fd_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

void sync_descriptor(int fd, const fs::path& path) {
  // Some file systems cannot sync a directory or a special file; there is nothing more to do on them.
  if (::fsync(fd) != 0 && errno != EINVAL && errno != EROFS)
    fail("cannot sync {}: {}", path.string(), reason(errno));
}

// `dir/` and `dir/.` name the same place as `dir`.
fs::path without_trailing_slash(fs::path path) {
  path = path.lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  check(path.has_filename() && path.filename() != "." && path.filename() != "..",
        "not a name to write to: '{}'", path.string());
  return path;
}

fs::path parent_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

constexpr const char* kTemporary = ".tmp-";

fs::path temporary_beside(const fs::path& path) {
  static std::atomic<uint64_t> counter{0};
  return path.string() + fmt::format("{}{}-{}", kTemporary, ::getpid(), counter++);
}

enum class Lock { kHeld, kTaken, kUnknown };  // kTaken: by someone else, or the directory is gone

// Takes the lock of a directory, which `*fd` then holds.
Lock lock_directory(const fs::path& path, int* fd) {
  *fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (*fd < 0) return errno == ENOENT ? Lock::kTaken : Lock::kUnknown;
  if (::flock(*fd, LOCK_EX | LOCK_NB) == 0) {
    struct stat held {};
    struct stat named {};
    if (::fstat(*fd, &held) == 0 && ::stat(path.c_str(), &named) == 0 && held.st_ino == named.st_ino)
      return Lock::kHeld;
  } else if (errno != EWOULDBLOCK) {  // a file system without locks
    ::close(std::exchange(*fd, -1));
    return Lock::kUnknown;
  }
  ::close(std::exchange(*fd, -1));
  return Lock::kTaken;
}

bool is_number(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

// Whether `name` is of temporary_beside's making: another name that merely begins so is somebody's own.
bool is_temporary(std::string_view name, const std::string& prefix) {
  if (!name.starts_with(prefix)) return false;
  name.remove_prefix(prefix.size());
  const size_t dash = name.find('-');
  return dash != std::string_view::npos && is_number(name.substr(0, dash)) &&
         is_number(name.substr(dash + 1));
}

std::vector<fs::path> temporaries_of(const fs::path& path) {
  const std::string prefix = path.filename().string() + kTemporary;
  std::vector<fs::path> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(parent_of(path), error))
    if (is_temporary(entry.path().filename().string(), prefix) && !entry.is_symlink())
      found.push_back(entry.path());
  return found;
}

// Removes temporary directories whose writer has died and let go of the lock.
void remove_abandoned(const fs::path& path) {
  for (const fs::path& entry : temporaries_of(path)) {
    int fd = -1;
    if (lock_directory(entry, &fd) != Lock::kHeld) continue;
    std::error_code ignored;
    fs::remove_all(entry, ignored);
    ::close(fd);
  }
}

}  // namespace

MappedFile::MappedFile(fs::path path, Mode mode) : path_(std::move(path)) {
  const Descriptor file(path_, O_RDONLY | O_NONBLOCK);  // a FIFO would wait for its writer
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) fail("cannot read {}: {}", path_.string(), reason(errno));
  check(S_ISREG(info.st_mode), "cannot map {}: not a regular file", path_.string());
  size_ = static_cast<size_t>(info.st_size);
  if (size_ == 0) return;  // mmap refuses a length of zero
  const int protection = mode == Mode::kCopyOnWrite ? PROT_READ | PROT_WRITE : PROT_READ;
  void* data = ::mmap(nullptr, size_, protection, MAP_PRIVATE | MAP_NORESERVE, file.get(), 0);
  if (data == MAP_FAILED) fail("cannot map {}: {}", path_.string(), reason(errno));
  data_ = static_cast<const std::byte*>(data);
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
}

void MappedFile::forget(Bytes bytes) const {
  static const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  // Whole pages inside the range: its neighbours keep theirs.
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(bytes.data()) + page - 1) / page * page;
  const uintptr_t end = reinterpret_cast<uintptr_t>(bytes.data() + bytes.size()) / page * page;
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

AtomicFile::AtomicFile(fs::path path) : path_(without_trailing_slash(std::move(path))) {
  struct stat info {};  // a rename onto /dev/null would take its place
  const bool exists = ::stat(path_.c_str(), &info) == 0;
  check(!exists || S_ISREG(info.st_mode), "cannot write {}: {}", path_.string(),
        S_ISDIR(info.st_mode) ? "it is a directory" : "it is not a regular file");
  do {  // another host may use the same process id on a shared file system
    temporary_ = temporary_beside(path_);
    fd_ = ::open(temporary_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (fd_ < 0 && errno == EEXIST);
  if (fd_ < 0) fail("cannot create {}: {}", path_.string(), reason(errno));
}

AtomicFile::~AtomicFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temporary_.c_str());
}

void AtomicFile::write_raw(uint64_t offset, Bytes bytes) {
  while (!bytes.empty()) {
    const ssize_t n =
        ::pwrite(fd_, bytes.data(), std::min(bytes.size(), kLargestWrite), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("cannot write {}: {} (at byte {})", path_.string(), reason(errno), offset);
    bytes = bytes.subspan(static_cast<size_t>(n));
    offset += static_cast<uint64_t>(n);
  }
  size_ = std::max(size_, offset);
}

void AtomicFile::flush() {
  if (buffer_.empty()) return;
  write_raw(end_ - buffer_.size(), as_bytes(buffer_));
  buffer_.clear();
}

void AtomicFile::append(Bytes bytes) {
  end_ += bytes.size();
  size_ = std::max(size_, end_);
  if (buffer_.size() + bytes.size() < kBuffer) {
    buffer_ += as_text(bytes);
    return;
  }
  const uint64_t begin = end_ - bytes.size();
  if (!buffer_.empty()) {
    write_raw(begin - buffer_.size(), as_bytes(buffer_));
    buffer_.clear();
  }
  write_raw(begin, bytes);
}

void AtomicFile::write_at(uint64_t offset, Bytes bytes) {
  flush();
  write_raw(offset, bytes);
  end_ = std::max(end_, offset + bytes.size());
}

void AtomicFile::reserve(uint64_t bytes) {
  if (bytes == 0) return;
  int error = ::fallocate(fd_, 0, 0, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  if (error == EOPNOTSUPP || error == ENOSYS)
    error = ::ftruncate(fd_, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  if (error != 0) fail("cannot write {}: {} ({} bytes needed)", path_.string(), reason(error), bytes);
  size_ = std::max(size_, bytes);
}

void AtomicFile::commit() {
  check(fd_ >= 0, "{} is already committed", path_.string());
  flush();
  sync_descriptor(fd_, path_);
  rename_durable(temporary_, path_);
  const int fd = std::exchange(fd_, -1);
  if (::close(fd) != 0) fail("cannot write {}: {}", path_.string(), reason(errno));
}

void write_file_atomic(const fs::path& path, Bytes bytes) {
  AtomicFile file(path);
  file.append(bytes);
  file.commit();
}

AtomicDirectory::AtomicDirectory(fs::path path, Existing existing)
    : path_(without_trailing_slash(std::move(path))), existing_(existing) {
  std::error_code error;
  if (existing_ == Existing::kRefuse) {
    // A rename does not go through a link: it would only fail at the end.
    check(!fs::is_symlink(fs::symlink_status(path_, error)), "{} is a symbolic link: name the place itself",
          path_.string());
    check(!fs::exists(path_, error) || (fs::is_directory(path_, error) && fs::is_empty(path_, error)),
          "{} exists already", path_.string());
  }
  make_directories(parent_of(path_));
  remove_abandoned(path_);
  for (bool made = false; !made;) {
    temporary_ = temporary_beside(path_);
    if (::mkdir(temporary_.c_str(), 0777) == 0)
      made = lock_directory(temporary_, &lock_) != Lock::kTaken;  // by one that took it for abandoned
    else if (errno != EEXIST)
      fail("cannot create {}: {}", path_.string(), reason(errno));
  }
}

AtomicDirectory::~AtomicDirectory() {
  std::error_code ignored;
  if (!temporary_.empty()) fs::remove_all(temporary_, ignored);
  if (lock_ >= 0) ::close(lock_);
}

void AtomicDirectory::commit() {
  check(!temporary_.empty(), "{} is already committed", path_.string());
  sync_tree(temporary_);
  if (existing_ == Existing::kReplace) {
    replace_directory(temporary_, path_);
  } else if (::rename(temporary_.c_str(), path_.c_str()) == 0) {
    sync_directory(parent_of(path_));
  } else {
    check(errno != ENOTEMPTY && errno != EEXIST && errno != ENOTDIR,
          "{} exists already: something else has made it in the meantime", path_.string());
    fail("cannot rename {} to {}: {}", temporary_.string(), path_.string(), reason(errno));
  }
  temporary_.clear();
}

DirectoryLock::DirectoryLock(const fs::path& directory) {
  const Lock lock = lock_directory(directory, &descriptor_);
  check(lock != Lock::kTaken, "{}: another process is at work in this directory", directory.string());
}

DirectoryLock::~DirectoryLock() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void remove_temporaries(const fs::path& path) {
  for (const fs::path& entry : temporaries_of(path)) {
    std::error_code error;
    fs::remove_all(entry, error);
    if (error) fail("cannot remove {}: {}", entry.string(), error.message());
  }
}

void replace_directory(const fs::path& from, const fs::path& to) {
  if (!fs::exists(to)) return rename_durable(from, to);
  fs::path old = from;  // after the exchange the old content has this name
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) {
    sync_directory(parent_of(to));
  } else if (errno == EINVAL || errno == ENOSYS) {  // this file system cannot exchange: two renames
    old = temporary_beside(to);
    rename_durable(to, old);
    rename_durable(from, to);
  } else {
    fail("cannot replace {}: {}", to.string(), reason(errno));
  }
  std::error_code error;
  fs::remove_all(old, error);
  if (error) fail("cannot remove {}: {}", old.string(), error.message());
}

void sync_directory(const fs::path& directory) {
  const Descriptor descriptor(directory, O_RDONLY | O_DIRECTORY);
  sync_descriptor(descriptor.get(), directory);
}

void sync_tree(const fs::path& directory) {
  for (const auto& entry : fs::directory_iterator(directory)) {
    if (entry.is_symlink()) continue;
    if (entry.is_directory()) {
      sync_tree(entry.path());
    } else if (entry.is_regular_file()) {
      const Descriptor file(entry.path(), O_RDONLY);
      sync_descriptor(file.get(), entry.path());
    }
  }
  sync_directory(directory);
}

void rename_durable(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0)
    fail("cannot rename {} to {}: {}", from.string(), to.string(), reason(errno));
  sync_directory(parent_of(to));
}

void make_directories(const fs::path& directory) {
  std::error_code error;
  fs::create_directories(directory, error);
  if (error) fail("cannot create directory {}: {}", directory.string(), error.message());
}

}  // namespace godwit::io
