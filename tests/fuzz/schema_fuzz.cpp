// text/json_grammar and text/token_filter: a schema, a zero byte, and bytes that choose among the tokens that
// are allowed. Whatever is drawn from what compiles is JSON that an independent checker takes, within its
// budget of tokens.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "godwit/text/token_filter.h"
#include "godwit/text/turn_grammar.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/vocabulary.h"
#include "tests/support/json_schema.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace godwit;
  using Json = nlohmann::ordered_json;
  static const auto trie = std::make_shared<const TokenTrie>(fuzz::vocabulary());
  const std::string_view all = fuzz::text(data, size);
  const size_t cut = std::min(all.find('\0'), all.size());
  const Json schema = Json::parse(all.substr(0, cut), nullptr, /*allow_exceptions=*/false);
  if (schema.is_discarded()) return 0;
  std::string_view choices = all.substr(std::min(cut + 1, all.size()));
  fuzz::accepts([&] {
    const auto grammar = json_grammar(schema);
    fuzz::require(grammar->least() > 0);
    if (grammar->least() > 2000) return;  // slow, and nothing new
    const auto budget = grammar->least() + static_cast<int64_t>(choices.size() / 2);
    TokenFilter filter(grammar, trie, budget);
    std::string text;
    for (int64_t n = 0; n < budget; ++n) {
      const auto& bits = filter.allowed();
      std::vector<int32_t> allowed;
      for (int32_t id = 0; id < trie->tokenizer().vocab_size(); ++id) {
        if (bits[id / 64] >> (id % 64) & 1) allowed.push_back(id);
      }
      const unsigned choice = choices.empty() ? 0 : static_cast<unsigned char>(choices[0]);
      if (!choices.empty()) choices.remove_prefix(1);
      if (allowed.empty() || (filter.complete() && choice % 2 == 0)) break;
      const int32_t id = allowed[choice % allowed.size()];
      filter.accept(id);
      text += trie->tokenizer().token_bytes(id);
    }
    fuzz::require(filter.complete());
    const Json value = Json::parse(text, nullptr, /*allow_exceptions=*/false);
    fuzz::require(!value.is_discarded());
    // std::regex recurses without bound; limits at the end of what doubles tell apart are not for this
    // checker.
    const std::string written = schema.dump();
    for (const char* word : {"pattern", "format", "inimum", "aximum"}) {
      if (written.find(word) != std::string::npos) return;
    }
    fuzz::require(test::valid(value, schema, schema));
  });
  return 0;
}
