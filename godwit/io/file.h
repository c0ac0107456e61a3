// Files: memory maps, and durable writes that appear under their final name complete or not at all. (Small
// files: base/file.h.) Every error names the path and the system's reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "godwit/base/file.h"

namespace godwit::io {

namespace fs = std::filesystem;
using Bytes = std::span<const std::byte>;

inline Bytes as_bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}
inline std::string_view as_text(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// A file mapped into memory; the bytes stay valid as long as the object. A file that someone truncates while
// it is mapped raises SIGBUS on access: replace files by rename, as everything here does, and old maps keep
// the old content.
class MappedFile {
 public:
  // kCopyOnWrite: pages may be written through a const_cast; the change is private to the process and never
  // reaches the file.
  enum class Mode { kReadOnly, kCopyOnWrite };
  explicit MappedFile(fs::path path, Mode mode = Mode::kReadOnly);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  Bytes bytes() const { return {data_, size_}; }
  // Gives back the memory of pages of `bytes` (a part of bytes()); they come from the file again when they
  // are read. For whoever walks through a file larger than memory. Edits of a copy-on-write map in them are
  // lost.
  void forget(Bytes bytes) const;
  uint64_t size() const { return size_; }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Writes NAME.tmp-<pid>-<n> beside the final place. commit() flushes, syncs to disk and renames; without it
// the destructor removes the temporary file. A killed process leaves at most a *.tmp-* file.
class AtomicFile {
 public:
  explicit AtomicFile(fs::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void append(Bytes bytes);  // at the end, buffered
  void append(std::string_view text) { append(as_bytes(text)); }
  void write_at(uint64_t offset, Bytes bytes);
  void reserve(uint64_t bytes);  // takes the space now, so that a full disk shows before the work is done
  void commit();

  uint64_t size() const { return size_; }  // one past the last byte written or reserved
  const fs::path& path() const { return path_; }

 private:
  void flush();
  void write_raw(uint64_t offset, Bytes bytes);

  fs::path path_;
  fs::path temporary_;
  int fd_ = -1;
  uint64_t end_ = 0;  // where append goes, buffer included
  uint64_t size_ = 0;
  std::string buffer_;
};

void write_file_atomic(const fs::path& path, Bytes bytes);
inline void write_file_atomic(const fs::path& path, std::string_view text) {
  write_file_atomic(path, as_bytes(text));
}

// A directory that appears complete or not at all: fill temporary(), then commit() syncs every file and
// renames. Parents are created. An existing non-empty directory of that name, or a symbolic link, is an
// error, unless `replace`: then the two change places in one step and the old one is removed. What killed
// writers of the same name left behind is removed first: a living one holds a lock on its directory.
class AtomicDirectory {
 public:
  enum class Existing { kRefuse, kReplace };
  explicit AtomicDirectory(fs::path path, Existing existing = Existing::kRefuse);
  ~AtomicDirectory();
  AtomicDirectory(const AtomicDirectory&) = delete;
  AtomicDirectory& operator=(const AtomicDirectory&) = delete;

  const fs::path& temporary() const { return temporary_; }
  const fs::path& path() const { return path_; }
  void commit();

 private:
  fs::path path_;
  fs::path temporary_;
  int lock_ = -1;  // descriptor of temporary_
  Existing existing_;
};

// One process at a time in a directory, as long as it lives; on a file system without locks it holds nothing.
// Throws Error where another has it.
class DirectoryLock {
 public:
  explicit DirectoryLock(const fs::path& directory);
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  int descriptor_ = -1;
};

// Removes what interrupted writers of `path` have left beside it (NAME.tmp-<pid>-<n>). Not while one may be
// at work.
void remove_temporaries(const fs::path& path);

// Syncs every file and directory below `directory` to disk.
void sync_tree(const fs::path& directory);
// Syncs the entries of one directory, so that a rename in it outlives a power cut.
void sync_directory(const fs::path& directory);
// rename(2), then syncs the parent. `to` is replaced if it is a file or an empty directory.
void rename_durable(const fs::path& from, const fs::path& to);
// Gives the directory `from` the name `to`. A directory that has this name is exchanged with it in one step,
// then removed.
void replace_directory(const fs::path& from, const fs::path& to);
void make_directories(const fs::path& directory);

}  // namespace godwit::io
