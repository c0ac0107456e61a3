// Streams of bytes and lines from plain and zstd-compressed files. A name that ends in .zst is compressed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "godwit/io/file.h"

namespace godwit::io {

class TextSource {
 public:
  explicit TextSource(fs::path path);
  ~TextSource();

  // Fills up to `size` bytes; fewer only at the end, 0 when all is read. A compressed file that is damaged or
  // ends inside a frame is an Error.
  size_t read(char* out, size_t size);

  uint64_t consumed() const;   // bytes of the file itself read so far, for progress
  uint64_t file_size() const;  // 0 for a pipe
  const fs::path& path() const { return path_; }

 private:
  struct State;
  fs::path path_;
  std::unique_ptr<State> state_;
};

std::string read_text(const fs::path& path);

class LineReader {
 public:
  explicit LineReader(fs::path path);

  // The next line with its '\n' (the last one may have none), valid until the next call; none at the end.
  std::optional<std::string_view> next();

  int64_t line_number() const { return line_; }  // of the line returned last, from 1
  std::string where() const;                     // "file:line" of that line
  uint64_t consumed() const { return source_.consumed(); }
  const fs::path& path() const { return source_.path(); }

 private:
  TextSource source_;
  std::string buffer_;
  size_t begin_ = 0;  // of the unread part of buffer_
  size_t end_ = 0;
  bool at_end_ = false;
  int64_t line_ = 0;
};

}  // namespace godwit::io
