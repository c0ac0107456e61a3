// What the fuzz targets share: bytes as a file, and what counts as a refusal. A target hands hostile bytes to
// a reader; the reader may accept them or throw Error (one clear line). Anything else (another exception, a
// crash, a sanitizer's report, a hang, memory without bound) is a finding.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

#include "godwit/base/check.h"

namespace godwit::fuzz {

// A directory of this process in the system's temporary directory, removed at exit.
inline const std::filesystem::path& scratch() {
  static const std::filesystem::path path = [] {
    std::string name = (std::filesystem::temp_directory_path() / "godwit-fuzz-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) std::abort();
    static std::string kept = name;
    std::atexit([] {
      std::error_code ignored;
      std::filesystem::remove_all(kept, ignored);
    });
    return std::filesystem::path(name);
  }();
  return path;
}

inline std::filesystem::path as_file(const char* name, std::string_view bytes) {
  const std::filesystem::path path = scratch() / name;
  std::FILE* file = std::fopen(path.c_str(), "wb");
  if (file == nullptr || std::fwrite(bytes.data(), 1, bytes.size(), file) != bytes.size()) std::abort();
  std::fclose(file);
  return path;
}

inline std::string_view text(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

// Runs `read`; true if it accepted the input. A refusal must be one line that says something.
template <class Read>
bool accepts(const Read& read) {
  try {
    read();
    return true;
  } catch (const Error& refusal) {
    if (std::string_view(refusal.what()).empty()) std::abort();
    return false;
  }
}

// A property that must hold for what was accepted.
inline void require(bool holds) {
  if (!holds) std::abort();
}

}  // namespace godwit::fuzz
