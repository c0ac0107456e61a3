// Files with one JSON value a line (plain or .zst). Errors name file:line.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "godwit/io/text_file.h"

namespace godwit::io {

// Throws Error, beginning with `where`, for JSON nested deeper than 256: reading it is harmless, but copying
// and writing the value recurse, and a line of two million brackets would end the program.
void check_nesting(std::string_view json, std::string_view where);

class JsonlReader {
 public:
  explicit JsonlReader(fs::path path) : lines_(std::move(path)) {}

  // The next value; lines of white space only are skipped. False at the end.
  bool next(nlohmann::json& value);

  // The line that the last value stood on, until the next call.
  std::string_view line() const { return line_; }
  std::string where() const { return lines_.where(); }
  uint64_t consumed() const { return lines_.consumed(); }

 private:
  LineReader lines_;
  std::string_view line_;
};

// The text of `key` in an object; absent or no string is an Error that begins with `where`.
std::string json_text(const nlohmann::json& object, std::string_view key, std::string_view where);
// A whole file as one JSON value.
nlohmann::json read_json(const fs::path& path);

}  // namespace godwit::io
