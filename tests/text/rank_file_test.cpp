#include "godwit/text/rank_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "godwit/base/check.h"
#include "tests/text/tokenizer_fixture.h"

namespace godwit {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

std::string good_file() {
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
  tokens.insert(tokens.end(), {"th", "the", "in t"});
  return format_ranks(tokens);
}

void expect_fault(const std::string& content, const std::string& message) {
  EXPECT_THAT([&] { parse_ranks(content, "v.model"); }, ThrowsMessage<Error>(HasSubstr(message)));
}

// The content with line `number` (from 1) replaced.
std::string with_line(const std::string& content, size_t number, const std::string& line) {
  size_t begin = 0;
  for (size_t i = 1; i < number; ++i) begin = content.find('\n', begin) + 1;
  return content.substr(0, begin) + line + content.substr(content.find('\n', begin));
}

TEST(RankFile, FormatAndParseAreInverse) {
  const std::string content = read_file(kFixture + "/tiktoken.model");
  const auto tokens = parse_ranks(content, "fixture");
  EXPECT_EQ(tokens.size(), 2000u);
  EXPECT_EQ(format_ranks(tokens), content);
}

TEST(RankFile, LinesMayComeInAnyOrderAndTheLastNewlineMayBeMissing) {
  const std::string content = good_file();
  const size_t first = content.find('\n') + 1;
  EXPECT_EQ(parse_ranks(content.substr(first) + content.substr(0, first), "v"), parse_ranks(content, "v"));
  EXPECT_EQ(parse_ranks(content.substr(0, content.size() - 1), "v"), parse_ranks(content, "v"));
}

TEST(RankFile, FaultsNameFileAndLine) {
  const std::string good = good_file();
  expect_fault("", "v.model: the file is empty");
  expect_fault(with_line(good, 257, "dG!= 256"), "v.model:257: invalid base64 'dG!='");
  expect_fault(with_line(good, 257, "dGg 256"), "v.model:257: invalid base64 'dGg'");
  expect_fault(with_line(good, 257, "dGk=x 256"), "v.model:257: invalid base64");
  expect_fault(with_line(good, 257, "dGl= 256"), "v.model:257: invalid base64");  // unused bits set
  expect_fault(with_line(good, 257, " 256"), "v.model:257: invalid base64");
  expect_fault(with_line(good, 257, "dGg="), "v.model:257: expected 'base64 rank', found no rank: 'dGg='");
  expect_fault(with_line(good, 257, "dGg= x"), "v.model:257: invalid rank 'x'");
  expect_fault(with_line(good, 257, "dGg= -1"), "v.model:257: invalid rank '-1'");
  expect_fault(with_line(good, 257, "dGg= 256 1"), "v.model:257: invalid rank '256 1'");
  expect_fault(with_line(good, 257, "dGg= 255"), "v.model:257: rank 255 is already on line 256");
  expect_fault(with_line(good, 258, "dGg= 257"), "v.model:258: token 'th' is already on line 257");
  expect_fault(with_line(good, 257, "dGg= 999999999"),
               "v.model:257: rank 999999999 is above the number of lines");
  expect_fault(with_line(good, 259, "aW4gdA== 259"), "v.model: rank 258 is missing");
  expect_fault(with_line(good, 1, "YWJj 0"), "v.model: no token for the single byte 0x00");
  expect_fault(good.substr(0, good.size() / 2), "v.model");
}

TEST(RankFile, EveryTruncationIsAFaultOrLosesWholeLines) {
  const std::string good = good_file();
  const auto tokens = parse_ranks(good, "v");
  for (size_t cut = 0; cut < good.size(); ++cut) {
    try {
      const auto some = parse_ranks(std::string_view(good).substr(0, cut), "v");
      EXPECT_TRUE(std::equal(some.begin(), some.end(), tokens.begin())) << cut;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), ::testing::StartsWith("v"));
    }
  }
}

TEST(RankFile, RandomBytesNeverCrash) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    EXPECT_THROW(parse_ranks(random_bytes(seed, 200), "v"), Error);
    std::string content = good_file();
    content[random_bits(seed, 9, 0) % content.size()] = static_cast<char>(random_bits(seed, 9, 1));
    try {
      parse_ranks(content, "v");
    } catch (const Error&) {
    }
  }
}

}  // namespace
}  // namespace godwit
