#include "godwit/text/stream_decoder.h"

#include <gtest/gtest.h>

#include "tests/text/tokenizer_fixture.h"

namespace godwit {
namespace {

// Every output is whole characters, and all outputs together are the decoded text.
void check_stream(const std::vector<int32_t>& ids) {
  const Tokenizer& tokenizer = fixture_tokenizer();
  StreamDecoder decoder(tokenizer);
  std::string all;
  for (const int32_t id : ids) {
    const std::string part = decoder.push(id);
    ASSERT_EQ(valid_utf8_prefix(part), part.size());
    all += part;
  }
  const std::string rest = decoder.finish();
  ASSERT_EQ(valid_utf8_prefix(rest), rest.size());
  ASSERT_EQ(all + rest, replace_invalid_utf8(tokenizer.decode(ids)));
  EXPECT_EQ(decoder.finish(), "");
}

TEST(StreamDecoder, GivesWholeCharactersOnly) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    check_stream(fixture_tokenizer().encode(planes_text(seed, 60)));
    check_stream(fixture_tokenizer().encode(pool_text(seed, 1, 60)));
  }
}

TEST(StreamDecoder, SurvivesArbitraryIds) {
  const auto vocabulary = static_cast<uint64_t>(fixture_tokenizer().vocab_size());
  for (uint64_t seed = 0; seed < 500; ++seed) {
    std::vector<int32_t> ids;
    for (uint64_t i = 0; i < 40; ++i) {
      // Half of the ids are single bytes above 0x7f.
      const uint64_t bits = random_bits(seed, 0, i);
      ids.push_back(static_cast<int32_t>(bits % 2 == 0 ? 128 + (bits >> 8) % 128 : (bits >> 8) % vocabulary));
    }
    check_stream(ids);
  }
}

TEST(StreamDecoder, WaitsForTheRestOfACharacterAndNoLonger) {
  StreamDecoder decoder(fixture_tokenizer());  // rank b is byte b
  EXPECT_EQ(decoder.push(0xf0), "");
  EXPECT_EQ(decoder.push(0x9f), "");
  EXPECT_EQ(decoder.push(0x98), "");
  EXPECT_EQ(decoder.push(0x80), "\U0001F600");
  EXPECT_EQ(decoder.push('a'), "a");
  EXPECT_EQ(decoder.push(0xe4), "");
  EXPECT_EQ(decoder.push('b'),
            "\uFFFD"
            "b");
  EXPECT_EQ(decoder.push(0x80), "\uFFFD");
  EXPECT_EQ(decoder.push(0xe4), "");
  EXPECT_EQ(decoder.finish(), "\uFFFD");
}

TEST(StreamDecoder, SkipsSpecialsWhenAsked) {
  const int32_t special = fixture_tokenizer().special_id(kEndOfMsg);
  StreamDecoder shows(fixture_tokenizer()), skips(fixture_tokenizer(), /*skip_specials=*/true);
  EXPECT_EQ(shows.push(special), "<|end_of_msg|>");
  EXPECT_EQ(skips.push(special), "");
}

}  // namespace
}  // namespace godwit
