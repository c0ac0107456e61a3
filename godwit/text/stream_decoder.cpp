#include "godwit/text/stream_decoder.h"

#include "godwit/text/utf8.h"

namespace godwit {

std::string StreamDecoder::push(int32_t id) {
  const std::string_view bytes = tokenizer_->token_bytes(id);
  if (skip_specials_ && tokenizer_->is_special(id)) return {};
  waiting_ += bytes;
  // Only a truncated character can be incomplete, and it begins in the last 3 bytes.
  size_t complete = waiting_.size();
  for (size_t back = 1; back <= 3 && back <= waiting_.size(); ++back) {
    const Utf8Char c = decode_utf8(waiting_, waiting_.size() - back);
    if (c.truncated && c.length == back) complete = waiting_.size() - back;
  }
  std::string out = replace_invalid_utf8(std::string_view(waiting_).substr(0, complete));
  waiting_.erase(0, complete);
  return out;
}

std::string StreamDecoder::finish() {
  std::string out = replace_invalid_utf8(waiting_);
  waiting_.clear();
  return out;
}

}  // namespace godwit
