// Times masks of allowed tokens on one core, in processor time:
//
//   token_filter_bench TEXT [RANKS...]      default 4096 and 163584 ranks
//
// The vocabulary is the bytes and the commonest pieces of TEXT of two to twelve letters. Texts of a schema
// are drawn at random; each mask is timed, as are masks of a state that was met before.
#include <algorithm>
#include <ctime>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "godwit/base/check.h"
#include "godwit/base/file.h"
#include "godwit/text/token_filter.h"
#include "godwit/text/turn_grammar.h"

namespace godwit {
namespace {

double milliseconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return 1e3 * static_cast<double>(now.tv_sec) + 1e-6 * static_cast<double>(now.tv_nsec);
}

Tokenizer vocabulary(const std::string& text, size_t ranks) {
  std::unordered_map<std::string, int64_t> counts;
  for (size_t at = 0; at < std::min<size_t>(text.size(), 1 << 21); ++at) {
    for (size_t n = 2; n <= 12 && at + n <= text.size(); ++n) ++counts[text.substr(at, n)];
  }
  std::vector<std::pair<int64_t, std::string>> order;
  for (auto& [piece, count] : counts) order.emplace_back(-count, piece);
  std::sort(order.begin(), order.end());
  std::vector<std::string> tokens;
  for (int i = 0; i < 256; ++i) tokens.emplace_back(1, static_cast<char>(i));
  for (const auto& [count, piece] : order) {
    if (tokens.size() < ranks) tokens.push_back(piece);
  }
  return Tokenizer::from_ranks(std::move(tokens));
}

const char* const kSchema =
    R"({"type": "object", "properties": {"name": {"type": "string"}, "kind": {"enum": ["a", "b", "c"]},
  "age": {"type": "integer", "minimum": 0, "maximum": 150}, "tags": {"type": "array", "items": {"type": "string"}},
  "when": {"type": "string", "format": "date-time"}, "child": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
  "required": ["name", "kind", "age", "tags", "when", "child"], "additionalProperties": false})";

double at_share(std::vector<double>& values, double share) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0
                        : values[std::min(values.size() - 1,
                                          static_cast<size_t>(share * static_cast<double>(values.size())))];
}

void time_masks(const Tokenizer& tokenizer) {
  const double start = milliseconds();
  const auto trie = std::make_shared<const TokenTrie>(tokenizer);
  const double trie_ms = milliseconds() - start;
  const double before = milliseconds();
  const auto grammar = turn_grammar({.thinking = false,
                                     .response = ResponseForm::kJsonSchema,
                                     .schema = nlohmann::ordered_json::parse(kSchema)},
                                    tokenizer);
  const double compile_ms = milliseconds() - before;
  std::vector<double> first, again;
  std::mt19937_64 random(1);
  for (int text = 0; text < 10; ++text) {
    TokenFilter filter(grammar, trie, 400);
    for (int n = 0; n < 400; ++n) {
      double from = milliseconds();
      const std::vector<uint64_t> bits = filter.allowed();
      first.push_back(milliseconds() - from);
      from = milliseconds();
      filter.allowed();
      again.push_back(milliseconds() - from);
      std::vector<int32_t> allowed;
      for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
        if (bits[id / 64] >> (id % 64) & 1) allowed.push_back(id);
      }
      if (allowed.empty()) break;
      filter.accept(allowed[random() % allowed.size()]);
    }
  }
  fmt::print(
      "{:7} ids, trie of {:7} nodes in {:4.0f} ms, schema in {:.2f} ms; a mask: mean {:.3f} ms, p99 {:.3f}, "
      "most {:.3f}; one that is kept: {:.4f}\n",
      tokenizer.vocab_size(), trie->nodes().size(), trie_ms, compile_ms,
      [&] {
        double sum = 0;
        for (const double x : first) sum += x;
        return sum / static_cast<double>(first.size());
      }(),
      at_share(first, 0.99), at_share(first, 1), at_share(again, 0.5));
}

}  // namespace
}  // namespace godwit

int main(int argc, char** argv) {
  using namespace godwit;
  if (argc < 2) return 2;
  const std::string text = read_file(argv[1]);
  std::vector<size_t> sizes;
  for (int i = 2; i < argc; ++i) sizes.push_back(std::stoul(argv[i]));
  if (sizes.empty()) sizes = {4096, 163584};
  for (const size_t ranks : sizes) time_masks(vocabulary(text, ranks));
}
