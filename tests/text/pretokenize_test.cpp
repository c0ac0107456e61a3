#include "godwit/text/pretokenize.h"

#include <gtest/gtest.h>

#include "godwit/text/unicode.h"
#include "tests/text/tokenizer_fixture.h"

namespace godwit {
namespace {

std::vector<size_t> ends_of(std::string_view text) {
  std::vector<size_t> ends;
  size_t end = 0;
  for (Pretokenizer pieces(text); !pieces.done();) {
    const std::string_view piece = pieces.next();
    EXPECT_FALSE(piece.empty());
    ends.push_back(end += piece.size());
  }
  return ends;
}

TEST(CharClasses, AreThoseOfTiktokensRegularExpressions) {
  Fnv hash;
  for (uint32_t code = 0; code < kCodePoints; ++code) hash.add(char_classes()[code]);
  EXPECT_EQ(hash.hex(), fixture()["class_table_fnv"].get<std::string>());
}

TEST(Pretokenizer, SplitsAsTiktoken) {
  for (const auto& c : fixture()["split"]) {
    EXPECT_EQ(ends_of(c["text"].get_ref<const std::string&>()), c["ends"].get<std::vector<size_t>>())
        << c["text"];
  }
}

TEST(Pretokenizer, SplitsManyRandomTextsAsTiktoken) {
  const auto& c = fixture()["split_random"];
  Fnv hash;
  for (uint64_t stream = 0; stream < c["streams"].get<uint64_t>(); ++stream) {
    for (const size_t end : ends_of(pool_text(c["seed"], stream, 1 + stream % 24)))
      hash.add(static_cast<uint32_t>(end));
  }
  EXPECT_EQ(hash.hex(), c["ends_fnv"].get<std::string>());
}

TEST(Pretokenizer, InvalidBytesSplitAsReplacementCharacters) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const std::string bytes = random_bytes(seed, seed % 50);
    std::vector<std::string> kept, replaced;
    for (Pretokenizer pieces(bytes); !pieces.done();) kept.push_back(replace_invalid_utf8(pieces.next()));
    const std::string valid = replace_invalid_utf8(bytes);
    for (Pretokenizer pieces(valid); !pieces.done();) replaced.emplace_back(pieces.next());
    EXPECT_EQ(kept, replaced) << seed;
  }
}

TEST(CutLongText, CutsRunsAndVeryLongTexts) {
  EXPECT_TRUE(cut_long_text("").empty());
  EXPECT_EQ(cut_long_text("ab c"), std::vector<std::string_view>{"ab c"});
  const auto sizes = [](const std::string& text) {
    std::vector<size_t> out;
    for (const std::string_view part : cut_long_text(text)) out.push_back(part.size());
    return out;
  };
  EXPECT_EQ(sizes(std::string(25'000, 'a')), std::vector<size_t>({25'000}));
  EXPECT_EQ(sizes(std::string(25'001, 'a')), std::vector<size_t>({25'000, 1}));
  // A cut is made inside the run that is too long, not where the run begins.
  EXPECT_EQ(sizes("a b " + std::string(60'000, 'c')), std::vector<size_t>({25'004, 25'000, 10'000}));
  EXPECT_EQ(sizes(std::string(20'000, ' ') + std::string(20'000, 'c')), std::vector<size_t>({40'000}));
  std::string words;
  while (words.size() < 900'000) words += "abc ";
  EXPECT_EQ(sizes(words), std::vector<size_t>({400'000, 400'000, 100'000}));
}

}  // namespace
}  // namespace godwit
