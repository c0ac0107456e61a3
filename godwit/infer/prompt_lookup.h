// Drafts by prompt lookup: what followed the last tokens when they stood in the text before.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace godwit {

// Follows one growing text.
class PromptLookup {
 public:
  // Up to `most` tokens that followed the latest earlier place of the text's last kLongest tokens, or of its
  // last kShortest; none where there is no such place. `text` is the one of the calls before, grown.
  std::vector<int32_t> draft(std::span<const int32_t> text, int64_t most);

  static constexpr int64_t kLongest = 4, kShortest = 2;

 private:
  void follow(std::span<const int32_t> text);

  int64_t seen_ = 0;                                    // places before this are in the tables
  std::unordered_map<uint64_t, int64_t> long_, short_;  // hash of the tokens before a place, to that place
};

}  // namespace godwit
