#include "godwit/io/jsonl.h"

#include <nlohmann/json.hpp>

#include "godwit/base/check.h"

namespace godwit::io {

void check_nesting(std::string_view json, std::string_view where) {
  constexpr int kDeepest = 256;
  int depth = 0;
  bool in_text = false;
  for (size_t i = 0; i < json.size(); ++i) {
    const char c = json[i];
    if (c == '"') in_text = !in_text;
    if (in_text) {
      i += c == '\\';  // what follows does not end the text
      continue;
    }
    if (c == '[' || c == '{') check(++depth <= kDeepest, "{}: JSON nested deeper than {}", where, kDeepest);
    if (c == ']' || c == '}') --depth;
  }
}

bool JsonlReader::next(nlohmann::json& value) {
  while (const auto line = lines_.next()) {
    if (line->find_first_not_of(" \t\r\n") == std::string_view::npos) continue;
    check_nesting(*line, where());
    try {
      value = nlohmann::json::parse(*line);
    } catch (const nlohmann::json::exception& error) {
      fail("{}: not valid JSON: {}", where(), error.what());
    }
    line_ = *line;
    return true;
  }
  return false;
}

std::string json_text(const nlohmann::json& object, std::string_view key, std::string_view where) {
  check(object.is_object(), "{}: expected a JSON object, got {}", where, object.type_name());
  const auto it = object.find(key);
  check(it != object.end(), "{}: the object has no \"{}\"", where, key);
  check(it->is_string(), "{}: \"{}\" is a {}, not a string", where, key, it->type_name());
  return it->get<std::string>();
}

nlohmann::json read_json(const fs::path& path) {
  const std::string text = read_regular_file(path);
  check_nesting(text, path.string());
  try {
    return nlohmann::json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    fail("{}: not valid JSON: {}", path.string(), error.what());
  }
}

}  // namespace godwit::io
