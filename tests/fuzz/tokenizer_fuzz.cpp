// text/rank_file and text/tokenizer: any bytes as a tiktoken file. The first byte chooses what surrounds the
// rest: as it is, or behind the 256 single bytes, which every vocabulary needs and a fuzzer does not find.
#include "godwit/text/rank_file.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace godwit;
  if (size == 0) return 0;
  static const std::string bytes = [] {
    std::vector<std::string> tokens;
    for (int i = 0; i < 256; ++i) tokens.emplace_back(1, static_cast<char>(i));
    return format_ranks(tokens);
  }();
  const std::string content = (data[0] % 2 ? bytes : "") + std::string(fuzz::text(data + 1, size - 1));
  std::vector<std::string> tokens;
  if (!fuzz::accepts([&] { tokens = parse_ranks(content, "tiktoken.model"); })) return 0;
  fuzz::require(parse_ranks(format_ranks(tokens), "written") == tokens);
  return 0;
}
