#include "godwit/text/json_grammar.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string_view>
#include <utility>

#include "godwit/base/check.h"
#include "godwit/text/grammar_number.h"
#include "godwit/text/json_grammar_parts.h"
#include "godwit/text/utf8.h"

namespace godwit {
namespace {

using Json = JsonGrammar::Json;

constexpr int kIndent = 32;          // blanks behind a line break
constexpr size_t kMostItems = 1000;  // of arrays with a number of items to them

int64_t count(const Json& schema, const char* key, int64_t fallback, const std::string& place) {
  const Json* value = find(schema, key);
  if (!value) return fallback;
  check(value->is_number_integer() && value->get<int64_t>() >= 0, "{}.{}: must be a whole number from 0",
        place, key);
  return value->get<int64_t>();
}

// Errors of the parts of a schema, with their place.
template <class F>
auto at_place(const std::string& place, const F& action) {
  try {
    return action();
  } catch (const Error& e) {
    fail("{}: {}", place, e.what());
  }
}

// A limit, or nothing where it says nothing about numbers of 18 digits.
std::optional<Decimal> limit(const Json& schema, const char* key, const std::string& place, bool low) {
  const Json* value = find(schema, key);
  if (!value) return std::nullopt;
  check(value->is_number(), "{}.{}: must be a number", place, key);
  const auto size = value->get<double>();
  if (std::abs(size) >= 1e18) {
    check(low == (size < 0), "{}.{}: no number of up to 18 digits is left", place, key);
    return std::nullopt;
  }
  if (value->is_number_integer()) return parse_decimal(value->dump());
  char text[512];
  const auto end = std::to_chars(std::begin(text), std::end(text), size, std::chars_format::fixed).ptr;
  return parse_decimal(std::string(text, end));
}

// The tighter of an inclusive and an exclusive limit.
void set_limit(const Json& schema, const std::string& place, bool low, std::optional<Decimal>& out,
               bool& inclusive) {
  const char* names[] = {low ? "minimum" : "maximum", low ? "exclusiveMinimum" : "exclusiveMaximum"};
  const Json* with = find(schema, names[0]);
  const Json* without = find(schema, names[1]);
  bool strict = without != nullptr;
  const auto inclusive_limit = limit(schema, names[0], place, low);
  const auto strict_limit = limit(schema, names[1], place, low);
  if (with && without) {
    const double a = with->get<double>(), b = without->get<double>();
    strict = low ? b >= a : b <= a;
  }
  out = strict ? strict_limit : inclusive_limit;
  inclusive = !strict;
}

const Json& anything() {
  static const Json schema = true;
  return schema;
}

}  // namespace

int32_t JsonGrammar::schema(const Json& root, const std::string& place) {
  return value_rule(root, root, place);
}

int32_t JsonGrammar::value_rule(const Json& schema, const Json& root, const std::string& place) {
  const auto [it, added] = rules_.try_emplace({&schema, &root}, -1);
  if (added) {
    it->second = g_.add_rule(place);
    pending_.push_back({it->second, &schema, &root, place});
  }
  return it->second;
}

void JsonGrammar::finish() {
  while (!pending_.empty()) {
    const Pending next = std::move(pending_.back());
    pending_.pop_back();
    const int32_t end = g_.add_node();
    g_.accept(end);
    for (const Leaf& each : leaves(*next.schema, *next.root, next.place)) {
      // Each way begins at a node of its own: loops at their beginning must not be shared.
      const int32_t begin = g_.add_node();
      g_.skip(g_.start(next.rule), begin);
      g_.skip(leaf(begin, each), end);
    }
  }
}

int32_t JsonGrammar::leaf(int32_t from, const Leaf& leaf) {
  switch (leaf.type) {
    case Type::kLiteral:
      return g_.literal(from, leaf.literal->dump());
    case Type::kAny:
      return g_.call(from, any_value(kAnyDepth));
    case Type::kNull:
      return g_.literal(from, "null");
    case Type::kBoolean: {
      const int32_t out = g_.literal(from, "true");
      g_.skip(g_.literal(from, "false"), out);
      return out;
    }
    case Type::kObject:
      return object(from, leaf);
    case Type::kArray:
      return array(from, leaf);
    case Type::kString: {
      const int32_t begin = g_.literal(from, "\"");
      return g_.literal(string_body(begin, leaf, Quoting::kJson), "\"");
    }
    case Type::kNumber:
    case Type::kInteger:
      return number(from, leaf);
  }
  fail("{}: no type", leaf.place);
}

int32_t JsonGrammar::string_body(int32_t from, const Leaf& leaf, Quoting quoting) {
  const Json& s = *leaf.schema;
  const Json* pattern = find(s, "pattern");
  const Json* format = find(s, "format");
  const bool counted = s.contains("minLength") || s.contains("maxLength");
  check(!(pattern && format) && !(counted && (pattern || format)),
        "{}: pattern, format and lengths are supported one at a time", leaf.place);
  if (pattern) {
    check(pattern->is_string(), "{}.pattern: must be a text", leaf.place);
    return at_place(leaf.place,
                    [&] { return add_pattern(g_, from, pattern->get_ref<const std::string&>(), quoting); });
  }
  if (format) {
    check(format->is_string(), "{}.format: must be a text", leaf.place);
    const auto& name = format->get_ref<const std::string&>();
    const std::string_view regular = format_pattern(name);
    check(!regular.empty(),
          "{}.format: '{}' is not supported (date-time, date, time, duration, email, hostname, ipv4, ipv6, "
          "uuid are)",
          leaf.place, readable(name));
    return add_pattern(g_, from, regular, quoting);
  }
  if (counted) {
    const int64_t least = count(s, "minLength", 0, leaf.place), most = count(s, "maxLength", -1, leaf.place);
    return at_place(leaf.place + " (minLength, maxLength)",
                    [&] { return add_counted_text(g_, from, least, most, quoting); });
  }
  const int32_t loop = g_.add_node();
  g_.skip(from, loop);
  add_any_text(g_, loop, quoting);
  return loop;
}

int32_t JsonGrammar::number(int32_t from, const Leaf& leaf) {
  const Json& s = *leaf.schema;
  NumberRange range{.integer = leaf.type == Type::kInteger};
  set_limit(s, leaf.place, /*low=*/true, range.low, range.low_inclusive);
  set_limit(s, leaf.place, /*low=*/false, range.high, range.high_inclusive);
  if (const Json* multiple = find(s, "multipleOf")) {
    check(multiple->is_number(), "{}.multipleOf: must be a number", leaf.place);
    const auto value = multiple->get<double>();
    check(value == std::trunc(value) && value >= 1 && value <= 1000,
          "{}.multipleOf: only whole numbers from 1 to 1000 are supported, got {}", leaf.place, value);
    range.multiple = static_cast<int64_t>(value);
    range.integer = true;  // whole multiples of whole numbers
  }
  if (range.low || range.high || range.multiple > 1) return add_number_range(g_, from, range);
  return range.integer ? add_any_number(g_, from, /*integer=*/true) : g_.call(from, any_number());
}

int32_t JsonGrammar::gap() {
  if (gap_ >= 0) return gap_;
  gap_ = g_.add_rule("white space");
  int32_t at = g_.start(gap_);
  g_.accept(at);
  const int32_t blank = g_.literal(at, " ");
  g_.accept(blank);
  at = g_.literal(at, "\n");
  for (int i = 0; i < kIndent; ++i) {
    g_.accept(at);
    at = g_.literal(at, " ");
  }
  g_.accept(at);
  return gap_;
}

// A key in quotation marks that is none of the declared ones, without escapes.
void JsonGrammar::other_key(int32_t from, int32_t to, const std::vector<std::string>& declared,
                            Quoting quoting) {
  const CharSet plain = quoting == Quoting::kJson ? CharSet({{0x20, 0x21}, {0x23, 0x5b}, {0x5d, 0x10ffff}})
                                                  : CharSet({{0x20, 0x21}, {0x23, 0x25}, {0x27, 0x10ffff}});
  const int32_t free = g_.add_node();
  add_chars(g_, free, free, plain, Quoting::kRaw);
  g_.edge(free, '"', '"', to);
  // Through a trie of the declared keys: whoever leaves it is free.
  struct Branch {
    int32_t node;
    size_t depth;  // bytes of the declared keys that have been read
    std::vector<std::string> keys;
  };
  std::vector<Branch> branches = {{g_.literal(from, "\""), 0, declared}};
  while (!branches.empty()) {
    const Branch branch = std::move(branches.back());
    branches.pop_back();
    std::map<uint32_t, std::vector<std::string>> by_next;
    bool declared_here = false;
    for (const std::string& key : branch.keys) {
      if (key.size() == branch.depth) {
        declared_here = true;
      } else {
        by_next[decode_utf8(key, branch.depth).code].push_back(key);
      }
    }
    if (!declared_here) g_.edge(branch.node, '"', '"', to);
    CharSet others = plain.complement();
    for (const auto& [code, keys] : by_next) {
      others.add(code, code);
      if (!plain.contains(code)) continue;
      const int32_t next = g_.add_node();
      add_chars(g_, branch.node, next, CharSet({{code, code}}), Quoting::kRaw);
      branches.push_back({next, branch.depth + decode_utf8(keys[0], branch.depth).length, keys});
    }
    add_chars(g_, branch.node, free, others.complement(), Quoting::kRaw);
  }
}

JsonGrammar::Object JsonGrammar::read_object(const Json& s, const std::string& place) {
  Object out;
  const Json* properties = find(s, "properties");
  if (properties) {
    check(properties->is_object(), "{}.properties: must be an object", place);
    for (const auto& [key, schema] : properties->items()) out.properties.emplace_back(key, &schema);
  }
  if (const Json* others = find(s, "additionalProperties")) {
    if (!others->is_boolean() || others->get<bool>()) out.others = others;
  } else if (out.properties.empty()) {
    out.others = &anything();
  }
  if (const Json* required = find(s, "required")) {
    check(required->is_array(), "{}.required: must be a list of keys", place);
    for (const Json& key : *required) {
      check(key.is_string(), "{}.required: must be a list of keys", place);
      const auto& name = key.get_ref<const std::string&>();
      if (!out.required.insert(name).second) continue;
      if (properties && properties->contains(name)) continue;
      const bool closed = s.contains("additionalProperties") && !out.others;
      check(!closed, "{}.required: '{}' is no property, and others are not allowed", place, readable(name));
      out.properties.emplace_back(name, out.others ? out.others : &anything());
    }
  }
  return out;
}

int32_t JsonGrammar::object(int32_t from, const Leaf& leaf) {
  const Object object = read_object(*leaf.schema, leaf.place);
  const auto value = [&](int32_t node, const Json& schema, const std::string& place) {
    const int32_t colon = g_.literal(node, ":"), blank = g_.literal(colon, " ");
    const int32_t begin = g_.add_node();
    g_.skip(colon, begin);
    g_.skip(blank, begin);
    return g_.call(begin, value_rule(schema, *leaf.root, place));
  };
  // `first`: nothing has been written yet; `later`: a comma is due.
  int32_t first = g_.call(g_.literal(from, "{"), gap()), later = g_.add_node();
  std::vector<std::string> keys;
  for (const auto& [key, schema] : object.properties) {
    keys.push_back(key);
    const int32_t begin = g_.add_node();
    g_.skip(first, begin);
    g_.skip(g_.call(g_.literal(later, ","), gap()), begin);
    const int32_t end = value(g_.literal(begin, Json(key).dump()), *schema,
                              fmt::format("{}.properties.{}", leaf.place, readable(key)));
    const int32_t next_first = g_.add_node(), next_later = g_.add_node();
    g_.skip(end, next_later);
    if (!object.required.contains(key)) {
      g_.skip(first, next_first);
      g_.skip(later, next_later);
    }
    first = next_first;
    later = next_later;
  }
  if (object.others) {
    const int32_t begin = g_.add_node(), key = g_.add_node();
    g_.skip(first, begin);
    g_.skip(g_.call(g_.literal(later, ","), gap()), begin);
    other_key(begin, key, keys, Quoting::kJson);
    g_.skip(value(key, *object.others, leaf.place + ".additionalProperties"), later);
  }
  const int32_t out = g_.literal(first, "}");
  g_.skip(g_.literal(g_.call(later, gap()), "}"), out);
  return out;
}

int32_t JsonGrammar::array(int32_t from, const Leaf& leaf) {
  const Json& s = *leaf.schema;
  const Json* unique = find(s, "uniqueItems");
  check(!unique || (unique->is_boolean() && !unique->get<bool>()),
        "{}.uniqueItems: this keyword is not supported", leaf.place);
  std::vector<const Json*> items;
  if (const Json* prefix = find(s, "prefixItems")) {
    check(prefix->is_array(), "{}.prefixItems: must be a list of schemas", leaf.place);
    for (const Json& item : *prefix) items.push_back(&item);
  }
  const Json* rest = find(s, "items");
  check(!rest || !rest->is_array(), "{}.items: a list of schemas is not supported, use prefixItems",
        leaf.place);
  const auto least = static_cast<size_t>(count(s, "minItems", 0, leaf.place));
  int64_t most = count(s, "maxItems", -1, leaf.place);
  const bool closed = rest && rest->is_boolean() && !rest->get<bool>();
  if (closed && (most < 0 || most > static_cast<int64_t>(items.size())))
    most = static_cast<int64_t>(items.size());
  if (!rest) rest = &anything();
  check(most < 0 || static_cast<int64_t>(least) <= most, "{}.minItems: {} is more than there may be, {}",
        leaf.place, least, most);
  const size_t counted = std::max({items.size(), least, static_cast<size_t>(std::max<int64_t>(most, 0))});
  check(counted <= kMostItems, "{}: more than {} counted items are not supported", leaf.place, kMostItems);
  const int32_t out = g_.add_node();
  int32_t at = g_.call(g_.literal(from, "["), gap());
  for (size_t i = 0;; ++i) {
    if (i >= least) g_.skip(g_.literal(i == 0 ? at : g_.call(at, gap()), "]"), out);
    if (most >= 0 && static_cast<int64_t>(i) == most) return out;
    const int32_t begin = i == 0 ? at : g_.call(g_.literal(at, ","), gap());
    const bool listed = i < items.size();
    const std::string place =
        listed ? fmt::format("{}.prefixItems[{}]", leaf.place, i) : leaf.place + ".items";
    const int32_t end = g_.call(begin, value_rule(listed ? *items[i] : *rest, *leaf.root, place));
    if (most < 0 && i > 0 && i >= counted) {  // from here on every item is like this one
      g_.skip(end, at);
      return out;
    }
    at = end;
  }
}

int32_t JsonGrammar::any_string() {
  if (any_string_ >= 0) return any_string_;
  any_string_ = g_.add_rule("a string");
  const int32_t body = g_.literal(g_.start(any_string_), "\"");
  add_any_text(g_, body, Quoting::kJson);
  g_.accept(g_.literal(body, "\""));
  return any_string_;
}

int32_t JsonGrammar::any_number() {
  if (any_number_ >= 0) return any_number_;
  any_number_ = g_.add_rule("a number");
  g_.accept(add_any_number(g_, g_.start(any_number_), /*integer=*/false));
  return any_number_;
}

int32_t JsonGrammar::any_object(int depth) {
  const auto [it, added] = any_objects_.try_emplace(depth, -1);
  if (!added) return it->second;
  const int32_t rule = it->second = g_.add_rule("an object");
  const int32_t begin = g_.call(g_.literal(g_.start(rule), "{"), gap());
  const int32_t member = g_.add_node();
  g_.skip(begin, member);
  const int32_t colon = g_.literal(g_.call(member, any_string()), ":"), value = g_.add_node();
  g_.skip(colon, value);
  g_.skip(g_.literal(colon, " "), value);
  const int32_t end = g_.call(value, any_value(depth - 1));
  g_.skip(g_.call(g_.literal(end, ","), gap()), member);
  g_.accept(g_.literal(begin, "}"));
  g_.accept(g_.literal(g_.call(end, gap()), "}"));
  return rule;
}

int32_t JsonGrammar::any_array(int depth) {
  const auto [it, added] = any_arrays_.try_emplace(depth, -1);
  if (!added) return it->second;
  const int32_t rule = it->second = g_.add_rule("an array");
  const int32_t begin = g_.call(g_.literal(g_.start(rule), "["), gap()), item = g_.add_node();
  g_.skip(begin, item);
  const int32_t end = g_.call(item, any_value(depth - 1));
  g_.skip(g_.call(g_.literal(end, ","), gap()), item);
  g_.accept(g_.literal(begin, "]"));
  g_.accept(g_.literal(g_.call(end, gap()), "]"));
  return rule;
}

int32_t JsonGrammar::any_value(int depth) {
  const auto [it, added] = any_values_.try_emplace(depth, -1);
  if (!added) return it->second;
  const int32_t rule = it->second = g_.add_rule("a value");
  const int32_t begin = g_.start(rule), out = g_.add_node();
  g_.accept(out);
  for (const char* word : {"true", "false", "null"}) g_.skip(g_.literal(begin, word), out);
  for (const int32_t scalar : {any_string(), any_number()}) g_.skip(g_.call(begin, scalar), out);
  if (depth == 0) return rule;
  for (const int32_t nested : {any_object(depth), any_array(depth)}) g_.skip(g_.call(begin, nested), out);
  return rule;
}

}  // namespace godwit
