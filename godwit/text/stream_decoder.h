// Ids to text while they are still coming. All output is valid UTF-8 and no character is ever given out in
// parts: bytes that may still become a character wait for the next id. What can no longer become one is
// U+FFFD, so that all output together is replace_invalid_utf8(tokenizer.decode(all ids)), however the ids
// arrive.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "godwit/text/tokenizer.h"

namespace godwit {

class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer, bool skip_specials = false)
      : tokenizer_(&tokenizer), skip_specials_(skip_specials) {}

  std::string push(int32_t id);  // the text that is now complete, often empty
  std::string finish();          // what was waiting, as U+FFFD; the decoder is then as new

 private:
  const Tokenizer* tokenizer_;
  bool skip_specials_;
  std::string waiting_;  // at most 3 bytes between calls
};

}  // namespace godwit
