#include "godwit/train/fields.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
// toml++ 3.3 asserts on some malformed keys ("[[a." at the end of a line): a refusal here, not an abort.
namespace godwit {
struct TomlFault {};
[[noreturn]] inline void toml_fault() {
  throw TomlFault();
}
}  // namespace godwit
#define TOML_ASSERT(expr) ((expr) ? static_cast<void>(0) : ::godwit::toml_fault())

#include <toml++/toml.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "godwit/base/check.h"
#include "godwit/base/file.h"

namespace godwit {
namespace {

using nlohmann::json;

// The first byte outside strings and comments that is not ASCII, or npos. TOML 1.0 has none there, and on
// some characters toml++ 3.3 does something undefined (U+FEFD, where it looks for white space).
size_t stray_character(std::string_view text) {
  constexpr std::string_view kMark = "\xEF\xBB\xBF";  // a byte order mark may begin the text
  for (size_t at = text.starts_with(kMark) ? kMark.size() : 0; at < text.size(); ++at) {
    const char c = text[at];
    if (static_cast<unsigned char>(c) >= 0x80) return at;
    if (c == '#') {
      at = std::min(text.find('\n', at), text.size());
    } else if (c == '"' || c == '\'') {
      const std::string long_quote(3, c);
      const bool many_lines = text.substr(at, 3) == long_quote;
      const std::string_view end = many_lines ? std::string_view(long_quote) : text.substr(at, 1);
      for (at += end.size(); at < text.size() && text.substr(at, end.size()) != end; ++at) {
        if (c == '"' && text[at] == '\\') ++at;
        if (!many_lines && at < text.size() && text[at] == '\n') break;
      }
      at += end.size() - 1;
    }
  }
  return std::string_view::npos;
}

std::string join(const std::string& prefix, std::string_view key) {
  return prefix.empty() ? std::string(key) : fmt::format("{}.{}", prefix, key);
}

std::string type_name(const toml::node& node) {
  switch (node.type()) {
    case toml::node_type::string:
      return "a string";
    case toml::node_type::integer:
      return "an integer";
    case toml::node_type::floating_point:
      return "a number with a point";
    case toml::node_type::boolean:
      return "true or false";
    case toml::node_type::array:
      return "an array";
    case toml::node_type::table:
      return "a table";
    default:
      return "a date or time";
  }
}

json to_json(const toml::node& node) {
  if (const auto* table = node.as_table()) {
    json out = json::object();
    for (const auto& [key, value] : *table) out[std::string(key.str())] = to_json(value);
    return out;
  }
  if (const auto* array = node.as_array()) {
    json out = json::array();
    for (const auto& value : *array) out.push_back(to_json(value));
    return out;
  }
  if (const auto* v = node.as_boolean()) return v->get();
  if (const auto* v = node.as_integer()) return v->get();
  if (const auto* v = node.as_floating_point()) return v->get();
  const auto text = node.value<std::string>();
  check(text.has_value(), "dates and times have no JSON form");
  if (*text == "null") return nullptr;
  return *text;
}

// ---- overrides
// ----------------------------------------------------------------------------------------------

struct Override {
  std::vector<std::string> path;  // keys and indices
  std::string text;               // as given, for errors
  toml::table parsed;             // {v = value}
};

Override parse_override(const std::string& text) {
  const size_t equals = text.find('=');
  check(equals != std::string::npos && equals > 0, "--set {}: expected key=value", text);
  Override out;
  out.text = text;
  std::stringstream keys(text.substr(0, equals));
  for (std::string key; std::getline(keys, key, '.');) {
    check(!key.empty(), "--set {}: an empty part in the key", text);
    out.path.push_back(key);
  }
  const std::string value = text.substr(equals + 1);
  try {
    if (stray_character(value) != std::string::npos) throw TomlFault();
    out.parsed = toml::parse("v = " + value);
  } catch (const toml::parse_error&) {
    out.parsed = toml::table{{"v", value}};
  } catch (const TomlFault&) {
    out.parsed = toml::table{{"v", value}};
  }
  return out;
}

// The element `part` of a table or an array; an absent table key is created as a table.
toml::node& descend(toml::node& node, const std::string& part, const std::string& text) {
  if (auto* table = node.as_table()) {
    if (!table->contains(part)) table->insert(part, toml::table{});
    return *table->get(part);
  }
  auto* array = node.as_array();
  check(array != nullptr, "--set {}: there is nothing below {}", text, type_name(node));
  size_t index = 0;
  const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), index);
  check(error == std::errc() && end == part.data() + part.size() && index < array->size(),
        "--set {}: expected an index below {}, got {}", text, array->size(), part);
  return *array->get(index);
}

void apply_override(toml::table& root, Override& o) {
  toml::node* node = &root;
  for (size_t i = 0; i + 1 < o.path.size(); ++i) node = &descend(*node, o.path[i], o.text);
  const std::string& last = o.path.back();
  o.parsed.get("v")->visit([&](auto& value) {
    if (auto* table = node->as_table()) {
      table->insert_or_assign(last, std::move(value));
    } else {
      descend(*node, last, o.text);  // checks the index
      auto& array = *node->as_array();
      array.replace(array.cbegin() + std::stol(last), std::move(value));
    }
  });
}

// ---- reader
// -------------------------------------------------------------------------------------------------

struct Source {
  std::string name;                          // file
  std::map<std::string, std::string> given;  // dotted key -> text of the --set that wrote it
};

class Reader : public Fields {
 public:
  Reader(const Source& source, const toml::table* table, std::string path, int64_t line)
      : source_(source), table_(table), path_(std::move(path)), line_(line) {}

  void value(std::string_view key, bool& variable) override {
    if (const auto* node = find(key)) variable = as(node->as_boolean(), key, *node, "true or false")->get();
  }
  void value(std::string_view key, int64_t& variable, Range range) override {
    const auto* node = find(key);
    if (node == nullptr) return;
    variable = as(node->as_integer(), key, *node, "an integer")->get();
    check_range(key, static_cast<double>(variable), range);
  }
  void value(std::string_view key, double& variable, Range range) override {
    const auto* node = find(key);
    if (node == nullptr) return;
    variable = number(key, *node);
    check_range(key, variable, range);
  }
  void value(std::string_view key, std::string& variable) override {
    if (const auto* node = find(key)) variable = as(node->as_string(), key, *node, "a string")->get();
  }
  void value(std::string_view key, std::vector<std::string>& variable) override {
    const auto* node = find(key);
    if (node == nullptr) return;
    variable.clear();
    for (const auto& item : *as(node->as_array(), key, *node, "an array of strings"))
      variable.push_back(as(item.as_string(), key, item, "a string")->get());
  }
  void value(std::string_view key, std::map<std::string, double>& variable, Range range) override {
    const auto* node = find(key);
    if (node == nullptr) return;
    variable.clear();
    for (const auto& [name, item] : *as(node->as_table(), key, *node, "a table of numbers")) {
      const std::string inner = fmt::format("{}.{}", key, name.str());
      check_range(inner, variable[std::string(name.str())] = number(inner, item), range);
    }
  }
  void shorthand(std::string_view key, int64_t& variable, Range range) override {
    value(key, variable, range);
  }
  void choice(std::string_view key, int& variable, const std::vector<std::string_view>& names) override {
    const auto* node = find(key);
    if (node == nullptr) return;
    const std::string text = as(node->as_string(), key, *node, "a string")->get();
    const auto found = std::find(names.begin(), names.end(), text);
    if (found == names.end())
      fail_at(key, fmt::format("expected one of {}, got \"{}\"", fmt::join(names, ", "), text));
    variable = static_cast<int>(found - names.begin());
  }
  void json(std::string_view key, std::string& variable) override {
    if (const auto* node = find(key)) variable = to_json(*as(node->as_table(), key, *node, "a table")).dump();
  }
  void table(std::string_view key, const Visit& visit) override {
    const auto* node = find(key);
    const toml::table* inner = node ? as(node->as_table(), key, *node, "a table") : nullptr;
    Reader reader(source_, inner, join(path_, key), node ? line_of(*node) : line_);
    visit(reader);
    reader.finish();
  }
  void tables(std::string_view key, size_t, const std::function<void(size_t)>& resize,
              const VisitItem& visit) override {
    const auto* node = find(key);
    if (node == nullptr) return;
    const toml::array& array = *as(node->as_array(), key, *node, "an array of tables");
    resize(array.size());
    for (size_t i = 0; i < array.size(); ++i) {
      const std::string item = fmt::format("{}.{}", key, i);
      const toml::table* inner = as(array[i].as_table(), item, array[i], "a table");
      Reader reader(source_, inner, join(path_, item), line_of(array[i]));
      visit(reader, i);
      reader.finish();
    }
  }
  void require(bool condition, std::string_view key, std::string_view message) override {
    if (!condition) fail_at(key, message);
  }

  // Every key that no visit asked for is an error.
  void finish() const {
    if (table_ == nullptr) return;
    for (const auto& [key, node] : *table_)
      if (!known_.contains(key.str()))
        fail_at(key.str(), fmt::format("unknown key; known here: {}", fmt::join(known_, ", ")));
  }

 private:
  const toml::node* find(std::string_view key) {
    known_.emplace(key);
    return table_ ? table_->get(key) : nullptr;
  }
  int64_t line_of(const toml::node& node) const {
    const auto line = static_cast<int64_t>(node.source().begin.line);
    return line > 0 ? line : line_;
  }
  double number(std::string_view key, const toml::node& node) const {
    if (const auto* integer = node.as_integer()) return static_cast<double>(integer->get());
    return as(node.as_floating_point(), key, node, "a number")->get();
  }
  template <class T>
  const T* as(const T* typed, std::string_view key, const toml::node& node, std::string_view expected) const {
    if (typed == nullptr) fail_at(key, fmt::format("expected {}, got {}", expected, type_name(node)));
    return typed;
  }
  void check_range(std::string_view key, double value, Range range) const {
    const bool bounded = std::isfinite(range.min) || std::isfinite(range.max);  // only kAny takes infinity
    if (value >= range.min && value <= range.max && !(bounded && std::isinf(value))) return;
    std::string expected;
    if (range.min == kPositive.min && std::isinf(range.max))
      expected = "a number above 0";
    else if (std::isinf(range.max))
      expected = fmt::format("a number of at least {}", range.min);
    else
      expected = fmt::format("a number from {} to {}", range.min, range.max);
    fail_at(key, fmt::format("expected {}, got {}", expected, value));
  }

  // file:line: dotted key: message. The line of the key, or of its table; an override is named instead.
  [[noreturn]] void fail_at(std::string_view key, std::string_view message) const {
    const std::string dotted = join(path_, key);
    std::string prefix = dotted;
    while (true) {
      const auto given = source_.given.find(prefix);
      if (given != source_.given.end()) fail("--set {}: {}: {}", given->second, dotted, message);
      const size_t dot = prefix.rfind('.');
      if (dot == std::string::npos) break;
      prefix.resize(dot);
    }
    int64_t line = line_;
    const toml::node* node = table_;
    std::stringstream parts{std::string(key)};
    for (std::string part; node != nullptr && std::getline(parts, part, '.');) {
      if (const auto* array = node->as_array())
        node = array->get(std::stoul(part));
      else
        node = node->is_table() ? node->as_table()->get(part) : nullptr;
      // What an override made has no line: then that of the table around it.
      if (node != nullptr && node->source().begin.line > 0) line = line_of(*node);
    }
    fail("{}:{}: {}: {}", source_.name, line, dotted, message);
  }

  const Source& source_;
  const toml::table* table_;  // null: the file does not have it
  std::string path_;
  int64_t line_;
  std::set<std::string, std::less<>> known_;
};

// ---- writer
// -------------------------------------------------------------------------------------------------

std::string quote(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\')
      out += fmt::format("\\{}", c);
    else if (c == '\n')
      out += "\\n";
    else if (byte < 0x20 || byte == 0x7f)
      out += fmt::format("\\u{:04x}", byte);
    else
      out += c;
  }
  return out + "\"";
}

std::string quote_key(std::string_view key) {
  const bool bare = !key.empty() && key.find_first_not_of(
                                        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                        "0123456789_-") == std::string_view::npos;
  return bare ? std::string(key) : quote(key);
}

// Shortest text that reads back to the same bits.
std::string number_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  std::string text = fmt::format("{}", value);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

std::string inline_text(const json& value) {
  if (value.is_null()) return quote("null");
  if (value.is_string()) return quote(value.get<std::string>());
  if (value.is_number_float()) return number_text(value.get<double>());
  if (value.is_array()) {
    std::vector<std::string> items;
    for (const auto& item : value) items.push_back(inline_text(item));
    return fmt::format("[{}]", fmt::join(items, ", "));
  }
  if (value.is_object()) {
    std::vector<std::string> items;
    for (const auto& [key, item] : value.items())
      items.push_back(fmt::format("{} = {}", quote_key(key), inline_text(item)));
    return fmt::format("{{{}}}", fmt::join(items, ", "));
  }
  return value.dump();
}

// TOML wants a table's own keys before its sub-tables, so those are collected apart.
class Writer : public Fields {
 public:
  explicit Writer(std::string path) : path_(std::move(path)) {}

  void value(std::string_view key, bool& variable) override { line(key, variable ? "true" : "false"); }
  void value(std::string_view key, int64_t& variable, Range) override { line(key, std::to_string(variable)); }
  void value(std::string_view key, double& variable, Range) override { line(key, number_text(variable)); }
  void value(std::string_view key, std::string& variable) override { line(key, quote(variable)); }
  void value(std::string_view key, std::vector<std::string>& variable) override {
    line(key, inline_text(nlohmann::json(variable)));
  }
  void value(std::string_view key, std::map<std::string, double>& variable, Range) override {
    if (!variable.empty()) line(key, inline_text(nlohmann::json(variable)));
  }
  void shorthand(std::string_view, int64_t&, Range) override {}
  void choice(std::string_view key, int& variable, const std::vector<std::string_view>& names) override {
    line(key, quote(names.at(variable)));
  }
  void json(std::string_view key, std::string& variable) override {
    line(key, inline_text(nlohmann::json::parse(variable)));
  }
  void table(std::string_view key, const Visit& visit) override {
    Writer writer(join(path_, key));
    visit(writer);
    below_ += fmt::format("\n[{}]\n{}", writer.path_, writer.text());
  }
  void tables(std::string_view key, size_t count, const std::function<void(size_t)>&,
              const VisitItem& visit) override {
    for (size_t i = 0; i < count; ++i) {
      Writer writer(join(path_, key));
      visit(writer, i);
      below_ += fmt::format("\n[[{}]]\n{}", writer.path_, writer.text());
    }
  }
  void require(bool, std::string_view, std::string_view) override {}

  std::string text() const { return own_ + below_; }

 private:
  void line(std::string_view key, const std::string& value) { own_ += fmt::format("{} = {}\n", key, value); }

  std::string path_, own_, below_;
};

// Like the writer, but each value under its dotted key.
class Flattener : public Fields {
 public:
  using Pairs = std::vector<std::pair<std::string, std::string>>;
  Flattener(Pairs& pairs, std::string path) : pairs_(pairs), path_(std::move(path)) {}

  void value(std::string_view key, bool& variable) override { add(key, variable ? "true" : "false"); }
  void value(std::string_view key, int64_t& variable, Range) override { add(key, std::to_string(variable)); }
  void value(std::string_view key, double& variable, Range) override { add(key, number_text(variable)); }
  void value(std::string_view key, std::string& variable) override { add(key, quote(variable)); }
  void value(std::string_view key, std::vector<std::string>& variable) override {
    add(key, inline_text(nlohmann::json(variable)));
  }
  void value(std::string_view key, std::map<std::string, double>& variable, Range) override {
    add(key, inline_text(nlohmann::json(variable)));
  }
  void shorthand(std::string_view, int64_t&, Range) override {}
  void choice(std::string_view key, int& variable, const std::vector<std::string_view>& names) override {
    add(key, quote(names.at(variable)));
  }
  void json(std::string_view key, std::string& variable) override {
    add(key, inline_text(nlohmann::json::parse(variable)));
  }
  void table(std::string_view key, const Visit& visit) override {
    Flattener inner(pairs_, join(path_, key));
    visit(inner);
  }
  void tables(std::string_view key, size_t count, const std::function<void(size_t)>&,
              const VisitItem& visit) override {
    for (size_t i = 0; i < count; ++i) {
      Flattener inner(pairs_, fmt::format("{}.{}", join(path_, key), i));
      visit(inner, i);
    }
  }
  void require(bool, std::string_view, std::string_view) override {}

 private:
  void add(std::string_view key, std::string value) {
    pairs_.emplace_back(join(path_, key), std::move(value));
  }

  Pairs& pairs_;
  std::string path_;
};

class Lister : public Fields {
 public:
  Lister(std::vector<std::string>& keys, std::string path) : keys_(keys), path_(std::move(path)) {}

  void value(std::string_view key, bool&) override { add(key); }
  void value(std::string_view key, int64_t&, Range) override { add(key); }
  void value(std::string_view key, double&, Range) override { add(key); }
  void value(std::string_view key, std::string&) override { add(key); }
  void value(std::string_view key, std::vector<std::string>&) override { add(key); }
  void value(std::string_view key, std::map<std::string, double>&, Range) override { add(key); }
  void shorthand(std::string_view key, int64_t&, Range) override { add(key); }
  void choice(std::string_view key, int&, const std::vector<std::string_view>&) override { add(key); }
  void json(std::string_view key, std::string&) override { add(key); }
  void table(std::string_view key, const Visit& visit) override {
    Lister lister(keys_, join(path_, key));
    visit(lister);
  }
  void tables(std::string_view key, size_t, const std::function<void(size_t)>& resize,
              const VisitItem& visit) override {
    resize(1);
    Lister lister(keys_, join(path_, key));
    visit(lister, 0);
  }
  void require(bool, std::string_view, std::string_view) override {}

 private:
  void add(std::string_view key) { keys_.push_back(join(path_, key)); }

  std::vector<std::string>& keys_;
  std::string path_;
};

}  // namespace

void read_fields(std::string_view text, const std::string& name, const std::vector<std::string>& overrides,
                 const Fields::Visit& visit) {
  if (const size_t at = stray_character(text); at != std::string_view::npos) {
    fail("{}:{}: a character that is not ASCII outside strings and comments", name,
         1 + std::count(text.begin(), text.begin() + static_cast<int64_t>(at), '\n'));
  }
  toml::table root;
  try {
    root = toml::parse(text, name);
  } catch (const toml::parse_error& error) {
    fail("{}:{}: {}", name, error.source().begin.line, error.description());
  } catch (const TomlFault&) {
    fail("{}: not valid TOML: a key is malformed", name);
  }
  Source source{.name = name, .given = {}};
  for (const std::string& given : overrides) {
    Override parsed = parse_override(given);
    apply_override(root, parsed);
    source.given[fmt::format("{}", fmt::join(parsed.path, "."))] = given;
  }
  Reader reader(source, &root, "", /*line=*/1);
  visit(reader);
  reader.finish();
}

void read_fields_file(const std::string& path, const std::vector<std::string>& overrides,
                      const Fields::Visit& visit) {
  read_fields(read_file(path), path, overrides, visit);
}

std::string write_fields(const Fields::Visit& visit) {
  Writer writer("");
  visit(writer);
  return writer.text();
}

std::vector<std::pair<std::string, std::string>> flatten_fields(const Fields::Visit& visit) {
  std::vector<std::pair<std::string, std::string>> pairs;
  Flattener flattener(pairs, "");
  visit(flattener);
  return pairs;
}

std::vector<std::string> list_fields(const Fields::Visit& visit) {
  std::vector<std::string> keys;
  Lister lister(keys, "");
  visit(lister);
  return keys;
}

}  // namespace godwit
