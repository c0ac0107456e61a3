// For tests/python/response_format_test.py: reads schemas, one a line, and draws texts that their grammar
// takes, tokens drawn evenly from those that are allowed.
//
//   schema_samples TOKENIZER COUNT BUDGET SEED < schemas.jsonl > samples.jsonl
//
// A line for each schema: {"samples": [...]} or {"error": ...}.
#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "godwit/base/check.h"
#include "godwit/text/token_filter.h"
#include "godwit/text/turn_grammar.h"

namespace {

using namespace godwit;

std::string draw(const std::shared_ptr<const Grammar>& grammar, const std::shared_ptr<const TokenTrie>& trie,
                 int64_t budget, std::mt19937_64& random) {
  TokenFilter filter(grammar, trie, budget);
  std::string text;
  for (int64_t n = 0; n < budget; ++n) {
    std::vector<int32_t> allowed;
    const auto& bits = filter.allowed();
    for (int32_t id = 0; id < trie->tokenizer().vocab_size(); ++id) {
      if (bits[id / 64] >> (id % 64) & 1) allowed.push_back(id);
    }
    if (allowed.empty() || (filter.complete() && random() % 2)) break;
    const int32_t id = allowed[random() % allowed.size()];
    filter.accept(id);
    text += trie->tokenizer().token_bytes(id);
  }
  check(filter.complete(), "the text does not end: {}", text);
  return text;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const Tokenizer tokenizer = Tokenizer::load(argv[1]);
  const auto trie = std::make_shared<const TokenTrie>(tokenizer);
  std::mt19937_64 random(std::strtoull(argv[4], nullptr, 10));
  std::string line;
  while (std::getline(std::cin, line)) {
    nlohmann::json out;
    try {
      const auto grammar = json_grammar(nlohmann::ordered_json::parse(line));
      for (int i = 0; i < std::atoi(argv[2]); ++i) {
        const int64_t budget =
            grammar->least() + static_cast<int64_t>(random() % std::strtoull(argv[3], nullptr, 10));
        out["samples"].push_back(draw(grammar, trie, budget, random));
      }
    } catch (const Error& e) {
      out = {{"error", e.what()}};
    }
    std::cout << out.dump() << '\n';
  }
}
