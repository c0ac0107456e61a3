#include "godwit/text/utf8.h"

#include <gtest/gtest.h>

namespace godwit {
namespace {

TEST(Utf8, EveryScalarValueGoesThereAndBack) {
  for (uint32_t code = 0; code < 0x110000; ++code) {
    if (code >= 0xd800 && code < 0xe000) continue;
    std::string bytes;
    append_utf8(code, bytes);
    const Utf8Char c = decode_utf8(bytes, 0);
    ASSERT_TRUE(c.valid && c.code == code && c.length == bytes.size()) << code;
    for (size_t cut = 1; cut < bytes.size(); ++cut) {
      const Utf8Char part = decode_utf8(std::string_view(bytes).substr(0, cut), 0);
      ASSERT_TRUE(!part.valid && part.truncated && part.length == cut) << code;
    }
  }
}

// Expected values are those of Python's bytes.decode("utf-8", "replace").
TEST(Utf8, InvalidBytesAreReplacedByMaximalSubparts) {
  const std::string fffd = "\xef\xbf\xbd";
  const auto times = [&](int n) {
    std::string out;
    for (int i = 0; i < n; ++i) out += fffd;
    return out;
  };
  const std::pair<std::string, std::string> cases[] = {
      {"", ""},
      {"a\xff z", "a" + fffd + " z"},
      {"\xc0\x80", times(2)},          // overlong
      {"\xe0\x80\x80", times(3)},      // overlong
      {"\xed\xa0\x80", times(3)},      // surrogate
      {"\xf4\x90\x80\x80", times(4)},  // above U+10FFFF
      {"\xf0\x9f\x98", times(1)},      // truncated
      {"\xf0\x9f\x98"
       "a",
       fffd + "a"},
      {"\xe4\xb8\xe4\xb8\xad", fffd + "\xe4\xb8\xad"},
      {"\x80\xbf", times(2)},
      {"\xf5\xf8\xfe", times(3)},
  };
  for (const auto& [bytes, expected] : cases) EXPECT_EQ(replace_invalid_utf8(bytes), expected);
  EXPECT_EQ(valid_utf8_prefix("ab\xc3\xa9\xc3"), 4u);
}

}  // namespace
}  // namespace godwit
