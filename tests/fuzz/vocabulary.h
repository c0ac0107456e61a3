// A vocabulary for fuzz targets: every byte, and words and ends that JSON and XTML are made of.
#pragma once

#include <string>
#include <vector>

#include "godwit/text/tokenizer.h"

namespace godwit::fuzz {

inline const Tokenizer& vocabulary() {
  static const Tokenizer tokenizer = [] {
    std::vector<std::string> tokens;
    for (int i = 0; i < 256; ++i) tokens.emplace_back(1, static_cast<char>(i));
    for (const char* word :
         {"{\"",      "\":",    "\": ",   "\",",      "\", \"", "\"}",      "}}",           "[[",
          "]]",       "],",     "null",   "true",     "false",  "12",       "think",        "response",
          "message",  "tools",  "call",   "argument", "json",   " tool",    " key",         " type",
          "=\"",      "string", "number", "object",   "\n  ",   "\xc3\xa4", "\xe2\x82\xac", "\xf0\x9f",
          "\x98\x80", "ab",     "abc",    "\\u",      "\\n",    "00"})
      tokens.emplace_back(word);
    return Tokenizer::from_ranks(std::move(tokens));
  }();
  return tokenizer;
}

}  // namespace godwit::fuzz
