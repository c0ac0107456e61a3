// Recipe files. A struct of options names its fields once, in `visit(Fields&, Options&)`; from that one list
// come the strict reader (an unknown key or an impossible value is an error with file, line and key), the
// writer of the resolved recipe, and the check that the documentation names every key. toml++ stays behind
// fields.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace godwit {

// Allowed values, both ends included.
struct Range {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
};
inline constexpr Range kAny{};
inline constexpr Range kNotNegative{0, std::numeric_limits<double>::infinity()};
inline constexpr Range kPositive{std::numeric_limits<double>::min(), std::numeric_limits<double>::infinity()};
inline constexpr Range kAtLeastOne{1, std::numeric_limits<double>::infinity()};
inline constexpr Range kShare{0, 1};

class Fields {
 public:
  virtual ~Fields() = default;
  using Visit = std::function<void(Fields&)>;
  using VisitItem = std::function<void(Fields&, size_t index)>;

  // A key that is absent leaves its variable as it is: the default.
  virtual void value(std::string_view key, bool& variable) = 0;
  virtual void value(std::string_view key, int64_t& variable, Range range = kAny) = 0;
  virtual void value(std::string_view key, double& variable, Range range = kAny) = 0;
  virtual void value(std::string_view key, std::string& variable) = 0;
  virtual void value(std::string_view key, std::vector<std::string>& variable) = 0;
  // Name = number pairs: a table such as `mix = {bible = 1.0, code = 0.5}`.
  virtual void value(std::string_view key, std::map<std::string, double>& variable, Range range) = 0;
  // Another way to give a value that is kept, and written, under a different key.
  virtual void shorthand(std::string_view key, int64_t& variable, Range range) = 0;
  // One word of `names`; `variable` is its index.
  virtual void choice(std::string_view key, int& variable, const std::vector<std::string_view>& names) = 0;
  // A whole table of free keys, kept as the text of a JSON object. TOML has no null: the string "null"
  // becomes it.
  virtual void json(std::string_view key, std::string& variable) = 0;
  // [key]: an absent table is visited too, so that checks inside see the defaults.
  virtual void table(std::string_view key, const Visit& visit) = 0;
  // [[key]]: `resize(n)` is called before the n tables are visited.
  virtual void tables(std::string_view key, size_t count, const std::function<void(size_t)>& resize,
                      const VisitItem& visit) = 0;

  // False makes the reader throw with the place of `key` (of its table, where the key is absent).
  virtual void require(bool condition, std::string_view key, std::string_view message) = 0;

  template <class Enum>
  void choice(std::string_view key, Enum& variable, const std::vector<std::string_view>& names) {
    int index = static_cast<int>(variable);
    choice(key, index, names);
    variable = static_cast<Enum>(index);
  }
  template <class Item>
  void tables(std::string_view key, std::vector<Item>& items, const VisitItem& visit) {
    tables(
        key, items.size(), [&](size_t n) { items.resize(n); }, visit);
  }
};

// Reads `text` (called `name` in errors) with the overrides `a.b.0.c=value` laid over it. The value is TOML;
// what is not valid TOML is taken as a string, so that `out=runs/x` needs no quotes. Array elements are named
// by index.
void read_fields(std::string_view text, const std::string& name, const std::vector<std::string>& overrides,
                 const Fields::Visit& visit);
// The same from a file.
void read_fields_file(const std::string& path, const std::vector<std::string>& overrides,
                      const Fields::Visit& visit);

// TOML text that read_fields reads back to the same values.
std::string write_fields(const Fields::Visit& visit);

// Every key with its value as TOML, dotted, elements of [[tables]] by index (`stage.0.context`), in the order
// of visiting.
std::vector<std::pair<std::string, std::string>> flatten_fields(const Fields::Visit& visit);

// Every key, dotted (`stage.context`), in the order of visiting; tables of tables are visited with one
// element.
std::vector<std::string> list_fields(const Fields::Visit& visit);

}  // namespace godwit
