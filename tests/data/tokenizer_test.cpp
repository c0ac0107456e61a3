#include "godwit/data/tokenizer.h"

#include <gtest/gtest.h>

namespace godwit::data {
namespace {

std::vector<std::string> byte_ranks(std::initializer_list<std::string> more = {}) {
  std::vector<std::string> ranks;
  for (int b = 0; b < 256; ++b) ranks.emplace_back(1, static_cast<char>(b));
  ranks.insert(ranks.end(), more.begin(), more.end());
  return ranks;
}

TEST(TokenizerHash, IsThatOfTheTokens) {
  const std::string bytes = tokenizer_hash(Tokenizer::from_ranks(byte_ranks()));
  EXPECT_EQ(bytes.size(), 16u);
  EXPECT_EQ(tokenizer_hash(Tokenizer::from_ranks(byte_ranks())), bytes);
  const std::string ab_cd = tokenizer_hash(Tokenizer::from_ranks(byte_ranks({"ab", "cd"})));
  EXPECT_NE(ab_cd, bytes);
  EXPECT_NE(tokenizer_hash(Tokenizer::from_ranks(byte_ranks({"cd", "ab"}))), ab_cd);
  EXPECT_NE(tokenizer_hash(Tokenizer::from_ranks(byte_ranks({"abc", "d"}))), ab_cd);
}

TEST(PackTokenizer, EncodesPlainTextAndEndsWithEos) {
  const Tokenizer tokenizer = Tokenizer::from_ranks(byte_ranks({"he"}));
  const PackTokenizer pack = pack_tokenizer(tokenizer);
  std::vector<int32_t> ids = {7};
  pack.encode("he[EOS]", ids);
  EXPECT_EQ(ids, (std::vector<int32_t>{7, 256, '[', 'E', 'O', 'S', ']'}));
  EXPECT_EQ(pack.eos_id, tokenizer.special_id(kEos));
  EXPECT_EQ(pack.vocab_size, 257 + kSpecialTokens);
  EXPECT_FALSE(pack.bos_id.has_value());
}

}  // namespace
}  // namespace godwit::data
