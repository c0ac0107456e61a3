#include "godwit/io/text_file.h"

#include <zstd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <system_error>
#include <vector>

#include "godwit/base/check.h"

namespace godwit::io {
namespace {
constexpr size_t kChunk = 1 << 18;
}  // namespace

struct TextSource::State {
  std::FILE* file = nullptr;
  uint64_t consumed = 0;
  uint64_t size = 0;
  ZSTD_DStream* zstd = nullptr;  // none: a plain file
  std::vector<char> input;
  ZSTD_inBuffer pending{};
  bool inside_frame = false;

  ~State() {
    if (file) std::fclose(file);
    if (zstd) ZSTD_freeDStream(zstd);
  }
};

TextSource::TextSource(fs::path path) : path_(std::move(path)), state_(std::make_unique<State>()) {
  std::error_code error;
  check(!fs::is_directory(path_, error), "cannot read {}: it is a directory", path_.string());
  state_->file = std::fopen(path_.c_str(), "rbe");
  if (!state_->file) fail("cannot open {}: {}", path_.string(), std::generic_category().message(errno));
  if (fs::is_regular_file(path_, error)) state_->size = fs::file_size(path_, error);
  if (path_.extension() == ".zst") {
    state_->zstd = ZSTD_createDStream();
    check(state_->zstd != nullptr, "cannot read {}: no memory for zstd", path_.string());
    state_->input.resize(kChunk);
  }
}

TextSource::~TextSource() = default;

uint64_t TextSource::consumed() const {
  return state_->consumed;
}
uint64_t TextSource::file_size() const {
  return state_->size;
}

size_t TextSource::read(char* out, size_t size) {
  State& s = *state_;
  const auto read_file = [&](char* to, size_t n) {
    const size_t got = std::fread(to, 1, n, s.file);
    if (got < n && std::ferror(s.file))
      fail("cannot read {}: {}", path_.string(), std::generic_category().message(errno));
    s.consumed += got;
    return got;
  };
  if (!s.zstd) return read_file(out, size);

  ZSTD_outBuffer target{out, size, 0};
  while (target.pos < size) {
    if (s.pending.pos == s.pending.size) {
      s.pending = {s.input.data(), read_file(s.input.data(), s.input.size()), 0};
      if (s.pending.size == 0 && !s.inside_frame) break;
    }
    const size_t before = target.pos;
    const bool no_input = s.pending.size == 0;
    const size_t rc = ZSTD_decompressStream(s.zstd, &target, &s.pending);
    check(!ZSTD_isError(rc), "{}: damaged zstd data near byte {}: {}", path_.string(), s.consumed,
          ZSTD_getErrorName(rc));
    s.inside_frame = rc != 0;  // 0 is exactly the end of a frame; another may follow
    check(!no_input || target.pos > before || !s.inside_frame, "{}: truncated zstd data", path_.string());
  }
  return target.pos;
}

std::string read_text(const fs::path& path) {
  TextSource source(path);
  std::string text;
  size_t size = 0;
  while (true) {
    text.resize(size + kChunk + size / 2);
    const size_t n = source.read(text.data() + size, text.size() - size);
    size += n;
    if (n == 0) break;
  }
  text.resize(size);
  return text;
}

LineReader::LineReader(fs::path path) : source_(std::move(path)), buffer_(kChunk, '\0') {}

std::optional<std::string_view> LineReader::next() {
  size_t searched = begin_;
  while (true) {
    const void* newline = std::memchr(buffer_.data() + searched, '\n', end_ - searched);
    if (newline || (at_end_ && begin_ < end_)) {
      const size_t stop = newline ? static_cast<const char*>(newline) - buffer_.data() + 1 : end_;
      const std::string_view line = std::string_view(buffer_).substr(begin_, stop - begin_);
      begin_ = stop;
      ++line_;
      return line;
    }
    if (at_end_) return std::nullopt;
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
    searched = end_;
    if (end_ == buffer_.size()) buffer_.resize(buffer_.size() * 2);
    const size_t n = source_.read(buffer_.data() + end_, buffer_.size() - end_);
    end_ += n;
    at_end_ = n == 0;
  }
}

std::string LineReader::where() const {
  return fmt::format("{}:{}", path().string(), line_);
}

}  // namespace godwit::io
