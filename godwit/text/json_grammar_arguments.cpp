// Arguments of a tool's call in the XTML format: an element for each, strings as they are, the rest as JSON.
#include <utility>

#include "godwit/base/check.h"
#include "godwit/text/json_grammar.h"

namespace godwit {
std::string xtml_attribute(const std::string& value) {
  std::string out;
  for (const char c : value) out += c == '&' ? "&amp;" : c == '"' ? "&quot;" : std::string(1, c);
  return out;
}

int32_t JsonGrammar::arguments(const Json& root, const std::string& place, const Marks& marks) {
  const int32_t rule = g_.add_rule(place);
  int32_t at = g_.start(rule);
  const std::vector<Leaf> all = leaves(root, root, place);
  const auto tag = [&](int32_t from, int32_t mark, std::string_view text) {
    return g_.special(g_.literal(g_.special(from, mark), text), marks.sep);
  };
  if (all.size() != 1 || all[0].type != Type::kObject) {
    for (const Leaf& leaf : all) {
      const bool object =
          leaf.type == Type::kObject || (leaf.type == Type::kLiteral && leaf.literal->is_object());
      check(object, "{}: the arguments of a tool must be an object", place);
    }
    const int32_t value = g_.call(tag(at, marks.open, "json"), value_rule(root, root, place));
    g_.accept(tag(value, marks.close, "json"));
    return rule;
  }
  const Object object = read_object(*all[0].schema, all[0].place);
  const auto begin = [&](int32_t from) { return g_.literal(g_.special(from, marks.open), "argument key="); };
  const auto rest = [&](int32_t key, const Json& schema, const std::string& where) {
    const int32_t value =
        argument_value(g_.literal(key, " type=\""), leaves(schema, *all[0].root, where), marks);
    return tag(value, marks.close, "argument");
  };
  std::vector<std::string> keys;
  for (const auto& [key, schema] : object.properties) {
    keys.push_back(key);
    const std::string where = fmt::format("{}.properties.{}", all[0].place, key);
    const int32_t out = g_.add_node();
    g_.skip(rest(g_.literal(begin(at), "\"" + xtml_attribute(key) + "\""), *schema, where), out);
    if (!object.required.contains(key)) g_.skip(at, out);
    at = out;
  }
  if (object.others) {
    const int32_t loop = g_.add_node(), behind_key = g_.add_node();
    g_.skip(at, loop);
    other_key(begin(loop), behind_key, keys, Quoting::kRaw);
    g_.skip(rest(behind_key, *object.others, all[0].place + ".additionalProperties"), loop);
    at = loop;
  }
  g_.accept(at);
  return rule;
}

// From behind `type="`: a type, the end of the tag, and a value of that type.
int32_t JsonGrammar::argument_value(int32_t from, const std::vector<Leaf>& leaves, const Marks& marks) {
  const int32_t out = g_.add_node();
  const auto body = [&](std::string_view type) {
    const int32_t begin = g_.add_node();
    g_.skip(g_.special(g_.literal(from, std::string(type) + "\""), marks.sep), begin);
    return begin;
  };
  for (const Leaf& each : leaves) {
    switch (each.type) {
      case Type::kString:
        g_.skip(string_body(body("string"), each, Quoting::kRaw), out);
        break;
      case Type::kLiteral:
        if (each.literal->is_string()) {
          g_.skip(g_.literal(body("string"), each.literal->get_ref<const std::string&>()), out);
        } else {
          g_.skip(leaf(body(type_name_of(*each.literal)), each), out);
        }
        break;
      case Type::kNumber:
      case Type::kInteger:
        g_.skip(leaf(body("number"), each), out);
        break;
      case Type::kBoolean:
        g_.skip(leaf(body("boolean"), each), out);
        break;
      case Type::kNull:
        g_.skip(leaf(body("null"), each), out);
        break;
      case Type::kObject:
        g_.skip(leaf(body("object"), each), out);
        break;
      case Type::kArray:
        g_.skip(leaf(body("array"), each), out);
        break;
      case Type::kAny: {
        const int32_t text = body("string");
        add_any_text(g_, text, Quoting::kRaw);
        g_.skip(text, out);
        g_.skip(g_.call(body("number"), any_number()), out);
        g_.skip(g_.call(body("object"), any_object(kAnyDepth)), out);
        g_.skip(g_.call(body("array"), any_array(kAnyDepth)), out);
        for (const char* word : {"true", "false"}) g_.skip(g_.literal(body("boolean"), word), out);
        g_.skip(g_.literal(body("null"), "null"), out);
        break;
      }
    }
  }
  return out;
}

}  // namespace godwit
