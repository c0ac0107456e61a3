// The ways in which a value may be valid: alternatives and references resolved, keywords checked.
#include <algorithm>
#include <cmath>
#include <string_view>

#include "godwit/base/check.h"
#include "godwit/text/json_grammar.h"
#include "godwit/text/json_grammar_parts.h"

namespace godwit {
namespace {

using Json = JsonGrammar::Json;

constexpr size_t kMostLeaves = 2000;

// Words that say nothing about validity.
constexpr std::string_view kNotes[] = {"title",    "description", "default",   "examples", "example",
                                       "$schema",  "$id",         "$comment",  "$defs",    "definitions",
                                       "readOnly", "writeOnly",   "deprecated"};
constexpr std::string_view kRules[] = {"type",
                                       "properties",
                                       "required",
                                       "additionalProperties",
                                       "items",
                                       "prefixItems",
                                       "minItems",
                                       "maxItems",
                                       "minLength",
                                       "maxLength",
                                       "pattern",
                                       "format",
                                       "minimum",
                                       "maximum",
                                       "multipleOf",
                                       "exclusiveMinimum",
                                       "exclusiveMaximum",
                                       "uniqueItems"};

template <size_t N>
bool is_one_of(std::string_view word, const std::string_view (&words)[N]) {
  return std::find(std::begin(words), std::end(words), word) != std::end(words);
}

}  // namespace

const char* JsonGrammar::type_name_of(const Json& value) {
  if (value.is_string()) return "string";
  if (value.is_boolean()) return "boolean";
  if (value.is_null()) return "null";
  if (value.is_number()) return "number";
  return value.is_object() ? "object" : "array";
}

bool JsonGrammar::has_type(const Json& value, std::string_view type) {
  if (type == "integer")
    return value.is_number_integer() ||
           (value.is_number_float() && std::trunc(value.get<double>()) == value.get<double>());
  return type == type_name_of(value);
}

const Json& JsonGrammar::resolve(const Json& reference, const Json& root, const std::string& place) const {
  check(reference.is_string(), "{}.$ref: must be a text", place);
  const auto& text = reference.get_ref<const std::string&>();
  check(text.starts_with('#'), "{}.$ref: '{}' does not point into the schema itself (#/...)", place,
        readable(text));
  try {
    return root.at(Json::json_pointer(text.substr(1)));
  } catch (const nlohmann::json::exception&) {
    fail("{}.$ref: there is no {}", place, readable(text));
  }
}

// All ways in which a value may be valid, alternatives within alternatives resolved. What was met before adds
// nothing: its ways are there already.
void JsonGrammar::flatten(const Json& schema, const Json& root, const std::string& place,
                          std::vector<const Json*>& seen, std::vector<Leaf>& out) const {
  check(out.size() < kMostLeaves, "{}: more than {} alternatives", place, kMostLeaves);
  if (std::find(seen.begin(), seen.end(), &schema) != seen.end()) return;
  seen.push_back(&schema);
  if (schema.is_boolean()) {
    if (schema.get<bool>())
      out.push_back({.schema = &schema, .root = &root, .type = Type::kAny, .place = place});
    return;
  }
  check(schema.is_object(), "{}: a schema must be an object, true or false", place);
  // One keyword may decide alone; beside it there are notes only.
  const auto alone = [&](const char* keyword) {
    for (const auto& [key, value] : schema.items()) {
      check(key == keyword || is_one_of(key, kNotes) ||
                (key == "type" &&
                 (std::string_view(keyword) == "enum" || std::string_view(keyword) == "const")),
            "{}.{}: not supported beside {}", place, readable(key), keyword);
    }
  };
  if (const Json* reference = find(schema, "$ref")) {
    alone("$ref");
    const Json& target = resolve(*reference, root, place);  // first: it checks that the reference is a text
    return flatten(target, root, reference->get<std::string>(), seen, out);
  }
  for (const char* keyword : {"anyOf", "allOf", "oneOf"}) {
    const Json* branches = find(schema, keyword);
    if (!branches) continue;
    alone(keyword);
    const std::string where = fmt::format("{}.{}", place, keyword);
    check(branches->is_array() && !branches->empty(), "{}: must be a list of schemas", where);
    if (std::string_view(keyword) == "oneOf") return one_of(*branches, root, where, out);
    check(std::string_view(keyword) != "allOf" || branches->size() == 1,
          "{}: only a list of one is supported", where);
    for (size_t i = 0; i < branches->size(); ++i)
      flatten((*branches)[i], root, fmt::format("{}[{}]", where, i), seen, out);
    return;
  }
  const Json* type = find(schema, "type");
  std::vector<std::string> types;
  if (type) {
    const Json list = type->is_array() ? *type : Json::array({*type});
    check(!list.empty(), "{}.type: must name at least one type", place);
    for (const Json& name : list) {
      check(name.is_string(), "{}.type: must be the name of a type, or a list of names", place);
      types.push_back(name.get<std::string>());
    }
  }
  for (const char* keyword : {"const", "enum"}) {
    const Json* values = find(schema, keyword);
    if (!values) continue;
    alone(keyword);
    const bool one = std::string_view(keyword) == "const";
    check(one || values->is_array(), "{}.enum: must be a list", place);
    for (size_t i = 0; i < (one ? 1 : values->size()); ++i) {
      const Json& value = one ? *values : (*values)[i];
      if (!types.empty() &&
          std::none_of(types.begin(), types.end(), [&](const auto& t) { return has_type(value, t); }))
        continue;
      check(out.size() < kMostLeaves, "{}: more than {} alternatives", place, kMostLeaves);
      out.push_back(
          {.schema = &schema, .root = &root, .type = Type::kLiteral, .place = place, .literal = &value});
    }
    return;
  }
  for (const auto& [key, value] : schema.items()) {
    check(is_one_of(key, kNotes) || is_one_of(key, kRules) || key.starts_with("x-"),
          "{}.{}: this keyword is not supported", place, readable(key));
  }
  if (types.empty()) {  // what the keywords speak of
    for (const auto& [keyword, name] :
         std::initializer_list<std::pair<const char*, const char*>>{{"properties", "object"},
                                                                    {"required", "object"},
                                                                    {"additionalProperties", "object"},
                                                                    {"items", "array"},
                                                                    {"prefixItems", "array"},
                                                                    {"minItems", "array"},
                                                                    {"maxItems", "array"},
                                                                    {"pattern", "string"},
                                                                    {"format", "string"},
                                                                    {"minLength", "string"},
                                                                    {"maxLength", "string"},
                                                                    {"minimum", "number"},
                                                                    {"maximum", "number"},
                                                                    {"exclusiveMinimum", "number"},
                                                                    {"exclusiveMaximum", "number"},
                                                                    {"multipleOf", "number"}}) {
      if (schema.contains(keyword) && std::find(types.begin(), types.end(), name) == types.end())
        types.emplace_back(name);
    }
    if (types.empty())
      return out.push_back({.schema = &schema, .root = &root, .type = Type::kAny, .place = place});
  }
  constexpr std::pair<std::string_view, Type> kTypes[] = {
      {"object", Type::kObject}, {"array", Type::kArray},     {"string", Type::kString},
      {"number", Type::kNumber}, {"integer", Type::kInteger}, {"boolean", Type::kBoolean},
      {"null", Type::kNull}};
  for (const std::string& name : types) {
    const auto at =
        std::find_if(std::begin(kTypes), std::end(kTypes), [&](const auto& t) { return t.first == name; });
    check(at != std::end(kTypes), "{}.type: there is no type '{}'", place, readable(name));
    out.push_back({.schema = &schema, .root = &root, .type = at->second, .place = place});
  }
}

std::vector<JsonGrammar::Leaf> JsonGrammar::leaves(const Json& schema, const Json& root,
                                                   const std::string& place) const {
  std::vector<Leaf> out;
  std::vector<const Json*> seen;
  flatten(schema, root, place, seen, out);
  return out;
}

// "Exactly one" is "any" where no value is of two branches.
void JsonGrammar::one_of(const Json& branches, const Json& root, const std::string& place,
                         std::vector<Leaf>& out) const {
  std::vector<std::vector<Leaf>> all;
  for (size_t i = 0; i < branches.size(); ++i) {
    all.push_back(leaves(branches[i], root, fmt::format("{}[{}]", place, i)));
    for (size_t j = 0; j < i; ++j) {
      for (const Leaf& a : all[i]) {
        for (const Leaf& b : all[j])
          check(disjoint(a, b),
                "{}: branches {} and {} may overlap; use anyOf, or a required key with a const of its own in "
                "each",
                place, j, i);
      }
    }
  }
  for (auto& branch : all) out.insert(out.end(), branch.begin(), branch.end());
}

bool JsonGrammar::disjoint(const Leaf& a, const Leaf& b) const {
  if (a.type == Type::kAny || b.type == Type::kAny) return false;
  const auto type_of = [](const Leaf& leaf) -> std::string_view {
    switch (leaf.type) {
      case Type::kObject:
        return "object";
      case Type::kArray:
        return "array";
      case Type::kString:
        return "string";
      case Type::kBoolean:
        return "boolean";
      case Type::kNull:
        return "null";
      case Type::kLiteral:
        return type_name_of(*leaf.literal);
      default:
        return "number";
    }
  };
  if (type_of(a) != type_of(b)) return true;
  if (a.type == Type::kLiteral && b.type == Type::kLiteral) return *a.literal != *b.literal;
  if (a.type != Type::kObject || b.type != Type::kObject) return false;
  // A key that both must have, with values that are named and differ.
  const auto required = [](const Json& schema, const std::string& key) {
    const Json* list = find(schema, "required");
    return list && list->is_array() && std::find(list->begin(), list->end(), key) != list->end();
  };
  const Json* ours = find(*a.schema, "properties");
  const Json* theirs = find(*b.schema, "properties");
  if (!ours || !theirs || !ours->is_object() || !theirs->is_object()) return false;
  for (const auto& [key, schema] : ours->items()) {
    if (!theirs->contains(key) || !required(*a.schema, key) || !required(*b.schema, key)) continue;
    const auto values = leaves(schema, *a.root, a.place), others = leaves((*theirs)[key], *b.root, b.place);
    const bool apart = std::all_of(values.begin(), values.end(), [&](const Leaf& x) {
      return std::all_of(others.begin(), others.end(), [&](const Leaf& y) {
        return x.type == Type::kLiteral && y.type == Type::kLiteral && *x.literal != *y.literal;
      });
    });
    if (apart) return true;
  }
  return false;
}

}  // namespace godwit
