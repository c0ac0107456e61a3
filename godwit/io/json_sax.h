// Base of the parsers of large or hostile JSON files: one pass, no tree, and an event that the format does
// not allow is an error. Unlike a tree parser it sees a key that comes twice. (nlohmann's SAX parser is
// iterative: deep nesting is harmless, and its lexer refuses text that is not UTF-8.)
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>

#include "godwit/base/check.h"

namespace godwit::io {

class StrictSax : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit StrictSax(std::string where) : where_(std::move(where)) {}

  // Parses all of `text`. Errors begin with `where`.
  void parse(std::string_view text) { nlohmann::json::sax_parse(text.begin(), text.end(), this); }

  bool null() override { refuse("null"); }
  bool boolean(bool) override { refuse("true or false"); }
  bool number_integer(number_integer_t) override { refuse("a negative number"); }
  bool number_unsigned(number_unsigned_t) override { refuse("a number"); }
  bool number_float(number_float_t, const string_t&) override { refuse("a number that is no integer"); }
  bool string(string_t&) override { refuse("a string"); }
  bool binary(binary_t&) override { refuse("binary data"); }
  bool start_object(std::size_t) override { refuse("an object"); }
  bool key(string_t&) override { refuse("a key"); }
  bool end_object() override { refuse("the end of an object"); }
  bool start_array(std::size_t) override { refuse("an array"); }
  bool end_array() override { refuse("the end of an array"); }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::json::exception& error) override {
    fail("{}: not valid JSON at byte {}: {}", where_, position, error.what());
  }

 protected:
  [[noreturn]] void refuse(std::string_view what) const {
    fail("{}: {} where the format has none{}", where_, what, place());
  }
  // Names the entry being read, for messages: " (tensor 'x')".
  virtual std::string place() const { return {}; }

  const std::string where_;
};

}  // namespace godwit::io
