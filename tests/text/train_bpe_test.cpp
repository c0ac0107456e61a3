#include "godwit/text/train_bpe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "godwit/base/check.h"
#include "godwit/text/bpe.h"
#include "godwit/text/pretokenize.h"
#include "tests/text/tokenizer_fixture.h"

namespace godwit {
namespace {

std::vector<std::string> train(std::string_view text, int64_t ranks, int64_t min_count = 2) {
  BpeTrainer trainer;
  trainer.add_text(text);
  return trainer.train({.ranks = ranks, .min_count = min_count});
}

// The definition as it stands: before every new token all text is encoded again, with the encoder itself.
std::vector<std::string> train_by_definition(std::string_view text, size_t ranks) {
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
  while (tokens.size() < ranks) {
    const Bpe bpe(tokens);
    std::map<std::string, int64_t> counts;  // sorted: the first of the most frequent has the lower bytes
    for (Pretokenizer pieces(text); !pieces.done();) {
      std::vector<int32_t> ids;
      bpe.encode_piece(pieces.next(), ids);
      for (size_t i = 0; i + 1 < ids.size(); ++i) ++counts[tokens[ids[i]] + tokens[ids[i + 1]]];
    }
    const auto best =
        std::max_element(counts.begin(), counts.end(), [](auto& a, auto& b) { return a.second < b.second; });
    if (best == counts.end() || best->second < 2) break;
    tokens.push_back(best->first);
  }
  return tokens;
}

TEST(BpeTrainer, IsItsDefinition) {
  std::string text = pool_text(30, 0, 4000);
  EXPECT_EQ(train(text, 400), train_by_definition(text, 400));
  // Few letters, so that tokens overlap in every way and the same bytes come from different pairs.
  for (uint64_t seed = 0; seed < 40; ++seed) {
    text.clear();
    for (uint64_t i = 0; i < 400; ++i) text += "aabbac "[random_bits(seed, 0, i) % (seed % 2 == 0 ? 7 : 6)];
    const auto expected = train_by_definition(text, 300);
    EXPECT_GT(expected.size(), 270u);
    EXPECT_EQ(train(text, static_cast<int64_t>(expected.size())), expected) << seed;
  }
}

TEST(BpeTrainer, FirstRanksAreTheBytesAndTiesGoToLowerBytes) {
  const auto tokens = train("ab ab cd cd xyz xyz xyz", 260);
  for (int byte = 0; byte < 256; ++byte) EXPECT_EQ(tokens[byte], std::string(1, static_cast<char>(byte)));
  EXPECT_EQ(tokens[256], " x");  // 3 times, as "xy" and "yz"
  EXPECT_EQ(tokens[257], " xy");
  EXPECT_EQ(tokens[258], " xyz");
  EXPECT_EQ(tokens[259], " c");  // 2 times, as "ab" and "cd"
}

TEST(BpeTrainer, DocumentsAddUpInAnyOrder) {
  BpeTrainer forward, backward;
  const std::string documents[] = {"the cat", "the dog and the cat", "a dog"};
  for (int i = 0; i < 3; ++i) {
    forward.add_text(documents[i]);
    backward.add_text(documents[2 - i]);
  }
  EXPECT_EQ(forward.train({.ranks = 262}), backward.train({.ranks = 262}));
}

// A trained token is what the encoder makes of its bytes, unless the pattern splits them.
TEST(BpeTrainer, TokensEncodeAsThemselves) {
  const Tokenizer& tokenizer = fixture_tokenizer();
  for (int32_t id = 0; id < tokenizer.ranks(); ++id) {
    const std::string_view bytes = tokenizer.token_bytes(id);
    if (Pretokenizer(bytes).next() != bytes) continue;
    EXPECT_EQ(tokenizer.encode(bytes), std::vector<int32_t>{id});
  }
}

TEST(BpeTrainer, TooLittleTextIsAnErrorThatSaysHowFarItGoes) {
  EXPECT_THAT([] { train("abab", 300); },
              ::testing::ThrowsMessage<Error>(::testing::HasSubstr("the text yields only 257 of 300 ranks")));
  EXPECT_THAT([] { train("", 257); },
              ::testing::ThrowsMessage<Error>(::testing::HasSubstr("only 256 of 257")));
  EXPECT_THAT([] { train("", 255); }, ::testing::ThrowsMessage<Error>(::testing::HasSubstr("at least 256")));
  EXPECT_EQ(train("", 256).size(), 256u);
}

TEST(BpeTrainer, ReportsProgress) {
  std::vector<int64_t> seen;
  BpeTrainer trainer;
  trainer.add_text(pool_text(31, 0, 20'000));
  trainer.train({.ranks = 520, .progress = [&](int64_t done) { seen.push_back(done); }});
  EXPECT_EQ(seen, std::vector<int64_t>({300, 400, 500}));
}

}  // namespace
}  // namespace godwit
