// Checks a JSON value against a schema: plain recursion, written apart from the grammar that is tested with
// it. Knows what JsonGrammar supports; formats are taken on trust.
#pragma once

#include <cmath>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>

namespace godwit::test {

using SchemaJson = nlohmann::ordered_json;

inline size_t characters(const std::string& text) {
  size_t n = 0;
  for (const char c : text) n += (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  return n;
}

inline bool is_of_type(const SchemaJson& v, const std::string& type) {
  if (type == "object") return v.is_object();
  if (type == "array") return v.is_array();
  if (type == "string") return v.is_string();
  if (type == "boolean") return v.is_boolean();
  if (type == "null") return v.is_null();
  if (type == "number") return v.is_number();
  return type == "integer" && v.is_number() && v.get<double>() == std::trunc(v.get<double>());
}

// `depth`: references that were followed at this value; where they lead in a circle it gives up and takes it.
inline bool valid(const SchemaJson& v, const SchemaJson& schema, const SchemaJson& root, int depth = 0) {
  if (depth > 8) return true;
  if (schema.is_boolean()) return schema.get<bool>();
  const auto has = [&](const char* key) { return schema.contains(key); };
  const auto count_valid = [&](const SchemaJson& list) {
    int n = 0;
    for (const auto& s : list) n += valid(v, s, root, depth) ? 1 : 0;
    return n;
  };
  if (has("$ref") && !valid(v, root.at(SchemaJson::json_pointer(schema["$ref"].get<std::string>().substr(1))),
                            root, depth + 1))
    return false;
  if (has("anyOf") && count_valid(schema["anyOf"]) == 0) return false;
  if (has("oneOf") && count_valid(schema["oneOf"]) != 1) return false;
  if (has("allOf") && count_valid(schema["allOf"]) != static_cast<int>(schema["allOf"].size())) return false;
  if (has("const") && v != schema["const"]) return false;
  if (has("enum") && std::find(schema["enum"].begin(), schema["enum"].end(), v) == schema["enum"].end())
    return false;
  if (has("type")) {
    bool any = false;
    if (schema["type"].is_string()) any = is_of_type(v, schema["type"]);
    if (schema["type"].is_array()) {
      for (const auto& type : schema["type"]) any = any || is_of_type(v, type);
    }
    if (!any) return false;
  }
  if (v.is_number()) {
    const auto x = v.get<double>();
    if (has("minimum") && x < schema["minimum"].get<double>()) return false;
    if (has("maximum") && x > schema["maximum"].get<double>()) return false;
    if (has("exclusiveMinimum") && x <= schema["exclusiveMinimum"].get<double>()) return false;
    if (has("exclusiveMaximum") && x >= schema["exclusiveMaximum"].get<double>()) return false;
    if (has("multipleOf") && v.is_number_integer() &&
        v.get<int64_t>() % schema["multipleOf"].get<int64_t>() != 0)
      return false;
  }
  if (v.is_string()) {
    const auto text = v.get<std::string>();
    if (has("minLength") && characters(text) < schema["minLength"].get<size_t>()) return false;
    if (has("maxLength") && characters(text) > schema["maxLength"].get<size_t>()) return false;
    if (has("pattern") && !std::regex_search(text, std::regex(schema["pattern"].get<std::string>())))
      return false;
  }
  if (v.is_array()) {
    if (has("minItems") && v.size() < schema["minItems"].get<size_t>()) return false;
    if (has("maxItems") && v.size() > schema["maxItems"].get<size_t>()) return false;
    const size_t listed = has("prefixItems") ? schema["prefixItems"].size() : 0;
    for (size_t i = 0; i < v.size(); ++i) {
      if (i < listed ? !valid(v[i], schema["prefixItems"][i], root)
                     : has("items") && !valid(v[i], schema["items"], root))
        return false;
    }
  }
  if (v.is_object()) {
    if (has("required")) {
      for (const auto& key : schema["required"]) {
        if (!v.contains(key.get<std::string>())) return false;
      }
    }
    for (const auto& [key, item] : v.items()) {
      if (has("properties") && schema["properties"].contains(key)) {
        if (!valid(item, schema["properties"][key], root)) return false;
      } else if (has("additionalProperties") && !valid(item, schema["additionalProperties"], root)) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace godwit::test
