#include "godwit/serve/prompt.h"

#include <utility>

#include "godwit/serve/api_error.h"
#include "godwit/text/pretokenize.h"

namespace godwit::serve {
namespace {

[[noreturn]] void refuse(const PromptLimit& limit, const std::string& length) {
  throw ApiError(400, fmt::format("{}: the prompt has {} tokens; {}", limit.param, length, limit.too_long),
                 limit.param, "context_length_exceeded");
}

}  // namespace

PromptReader::PromptReader(const Tokenizer& tokenizer, PromptLimit limit, std::function<bool()> gone)
    : tokenizer_(tokenizer), limit_(std::move(limit)), gone_(std::move(gone)) {}

void PromptReader::check_count(int64_t ids) const {
  if (ids >= limit_.tokens) refuse(limit_, std::to_string(ids));
}

// No token is longer than the longest: so many there are at least.
void PromptReader::check_bytes(int64_t bytes) const {
  const auto longest = static_cast<int64_t>(tokenizer_.longest_token());
  const int64_t least = (bytes + longest - 1) / longest;
  if (least >= limit_.tokens && bytes > kExact) refuse(limit_, fmt::format("at least {}", least));
}

void PromptReader::add_part(std::string_view part, bool control, std::vector<int32_t>& ids) const {
  if (gone_()) throw ClientGone();
  if (control) {
    const std::vector<int32_t> more = tokenizer_.encode_with_specials(part);
    ids.insert(ids.end(), more.begin(), more.end());
  } else {
    tokenizer_.encode_append(part, ids);
  }
}

void PromptReader::check_so_far(const std::vector<int32_t>& ids, int64_t read, int64_t bytes) const {
  const auto count = static_cast<int64_t>(ids.size());
  if (count < limit_.tokens || (read < bytes && bytes <= kExact)) return;
  if (read >= bytes) refuse(limit_, std::to_string(count));
  const auto all = static_cast<int64_t>(static_cast<double>(count) * static_cast<double>(bytes) /
                                        static_cast<double>(read));
  refuse(limit_, fmt::format("more than {}, about {} in all", count, all));
}

std::vector<int32_t> PromptReader::text(std::string_view text) const {
  const auto bytes = static_cast<int64_t>(text.size());
  check_bytes(bytes);
  std::vector<int32_t> ids;
  int64_t read = 0;
  for (const std::string_view part : cut_long_text(text)) {
    add_part(part, /*control=*/false, ids);
    read += static_cast<int64_t>(part.size());
    check_so_far(ids, read, bytes);
  }
  return ids;
}

std::vector<int32_t> PromptReader::chat(std::span<const ChatSegment> segments) const {
  for (const std::string_view name : {kOpen, kClose, kSep, kEndOfMsg})
    tokenizer_.special_id(name);  // or an Error
  int64_t bytes = 0, read = 0;
  for (const ChatSegment& segment : segments) bytes += static_cast<int64_t>(segment.text.size());
  check_bytes(bytes);
  std::vector<int32_t> ids;
  for (const ChatSegment& segment : segments) {
    if (segment.control) {
      add_part(segment.text, /*control=*/true, ids);
    } else {
      for (const std::string_view part : cut_long_text(segment.text)) add_part(part, /*control=*/false, ids);
    }
    read += static_cast<int64_t>(segment.text.size());
    check_so_far(ids, read, bytes);
  }
  return ids;
}

}  // namespace godwit::serve
