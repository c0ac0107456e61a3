// Prompts that strangers send, text to ids: refused before the work where they cannot fit, read in parts, and
// given up when nobody waits for them any more.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "godwit/text/chat_format.h"
#include "godwit/text/tokenizer.h"

namespace godwit::serve {

// Thrown where the client has gone: there is nobody to tell.
struct ClientGone {};

struct PromptLimit {
  int64_t tokens = 0;    // fewer than that
  std::string param;     // of the request, for errors
  std::string too_long;  // what the limit is: "this server's context holds 8192 with the answer"
};

class PromptReader {
 public:
  PromptReader(const Tokenizer& tokenizer, PromptLimit limit, std::function<bool()> gone);

  // Throw ApiError 400 (context_length_exceeded) that says how long the prompt is, and ClientGone. A text
  // above kExact bytes is read no further than the limit; its length is then an estimate.
  std::vector<int32_t> text(std::string_view text) const;
  std::vector<int32_t> chat(std::span<const ChatSegment> segments) const;
  // Ids that came as such.
  void check_count(int64_t ids) const;

  static constexpr int64_t kExact = int64_t{1} << 20;

 private:
  void check_bytes(int64_t bytes) const;
  void add_part(std::string_view part, bool control, std::vector<int32_t>& ids) const;
  void check_so_far(const std::vector<int32_t>& ids, int64_t read, int64_t bytes) const;

  const Tokenizer& tokenizer_;
  PromptLimit limit_;
  std::function<bool()> gone_;
};

}  // namespace godwit::serve
