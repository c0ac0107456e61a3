// JSON schemas as parts of a grammar: every text of the grammar is JSON that the schema takes.
//
// Supported: type (also a list), properties, required, additionalProperties, items, prefixItems, minItems,
// maxItems, enum, const, anyOf, oneOf (whose branches cannot overlap), allOf of one, $ref to a place of the
// schema itself with recursion, $defs; strings with minLength, maxLength, pattern, format; numbers with
// minimum, maximum, exclusiveMinimum, exclusiveMaximum, whole multipleOf. Other keywords are an Error that
// names the keyword and its place.
//
// Where a schema leaves room the grammar takes less: the keys that are declared come in their order; an
// object that declares keys and says nothing of others has no others; additional keys are written without
// escapes; numbers have a bounded number of digits; a value that may be anything is nested 16 deep at most.
// White space is what writers of JSON use: a blank behind ':' and ',', or line breaks with indents.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "godwit/text/grammar.h"
#include "godwit/text/grammar_text.h"

namespace godwit {

// The value of an attribute, as the chat format writes it.
std::string xtml_attribute(const std::string& value);

class JsonGrammar {
 public:
  using Json = nlohmann::ordered_json;

  explicit JsonGrammar(Grammar& g) : g_(g) {}

  // A rule for the values of a schema. `root`, which "$ref" points into, must outlive finish(). `place`:
  // where the schema stands, for errors. Throws Error.
  int32_t schema(const Json& root, const std::string& place);
  // Any object, as response_format json_object wants.
  int32_t any_object() { return any_object(kAnyDepth); }

  // A call's arguments in the XTML format: a sequence of argument elements, or a json block where the schema
  // is no plain object. `mark` holds the special tokens of tags. Gives a rule.
  struct Marks {
    int32_t open, close, sep;  // of the 256 special tokens
  };
  int32_t arguments(const Json& root, const std::string& place, const Marks& marks);

  // To be called when all rules have been asked for: builds those that others referred to.
  void finish();

 private:
  static constexpr int kAnyDepth = 16;  // of values that may be anything

  enum class Type { kObject, kArray, kString, kNumber, kInteger, kBoolean, kNull, kLiteral, kAny };
  // One way of being valid: a schema without alternatives, and one of its types.
  struct Leaf {
    const Json* schema = nullptr;
    const Json* root = nullptr;
    Type type = Type::kAny;
    std::string place;
    const Json* literal = nullptr;  // kLiteral: a value of enum, or const
  };
  struct Pending {
    int32_t rule;
    const Json* schema;
    const Json* root;
    std::string place;
  };
  // What an object declares.
  struct Object {
    std::vector<std::pair<std::string, const Json*>> properties;
    std::set<std::string> required;
    const Json* others = nullptr;  // the schema of additional keys; null: there are none
  };

  int32_t value_rule(const Json& schema, const Json& root, const std::string& place);
  void flatten(const Json& schema, const Json& root, const std::string& place, std::vector<const Json*>& seen,
               std::vector<Leaf>& out) const;
  std::vector<Leaf> leaves(const Json& schema, const Json& root, const std::string& place) const;
  const Json& resolve(const Json& reference, const Json& root, const std::string& place) const;
  void one_of(const Json& branches, const Json& root, const std::string& place, std::vector<Leaf>& out) const;
  bool disjoint(const Leaf& a, const Leaf& b) const;
  static const char* type_name_of(const Json& value);
  static bool has_type(const Json& value, std::string_view type);
  static Object read_object(const Json& schema, const std::string& place);

  int32_t leaf(int32_t from, const Leaf& leaf);
  int32_t object(int32_t from, const Leaf& leaf);
  int32_t array(int32_t from, const Leaf& leaf);
  int32_t string_body(int32_t from, const Leaf& leaf, Quoting quoting);
  int32_t number(int32_t from, const Leaf& leaf);
  int32_t any_value(int depth);
  int32_t any_object(int depth);
  int32_t any_array(int depth);
  int32_t any_number();
  int32_t any_string();
  int32_t gap();
  void other_key(int32_t from, int32_t to, const std::vector<std::string>& declared, Quoting quoting);
  int32_t argument_value(int32_t from, const std::vector<Leaf>& leaves, const Marks& marks);

  Grammar& g_;
  std::map<std::pair<const Json*, const Json*>, int32_t> rules_;
  std::vector<Pending> pending_;
  std::map<int, int32_t> any_values_, any_objects_, any_arrays_;
  int32_t any_string_ = -1, any_number_ = -1, gap_ = -1;
};

}  // namespace godwit
