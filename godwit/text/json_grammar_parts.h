// Shared by the sources of JsonGrammar.
#pragma once

#include <string>
#include <string_view>

#include "godwit/text/json_grammar.h"
#include "godwit/text/utf8.h"

namespace godwit {

// A word of a schema, for an error.
inline std::string readable(std::string_view text) {
  return replace_invalid_utf8(text.substr(0, 100));
}

inline const JsonGrammar::Json* find(const JsonGrammar::Json& object, const char* key) {
  const auto at = object.find(key);
  return at == object.end() ? nullptr : &*at;
}

}  // namespace godwit
