#include "godwit/infer/prompt_lookup.h"

#include <algorithm>

#include "godwit/base/rng.h"

namespace godwit {
namespace {

// Of the `count` tokens before place `at`.
uint64_t hash_before(std::span<const int32_t> text, int64_t at, int64_t count) {
  uint64_t hash = static_cast<uint64_t>(count);
  for (int64_t i = at - count; i < at; ++i) hash = mix64(hash ^ static_cast<uint64_t>(text[i]) << 8);
  return hash;
}

}  // namespace

void PromptLookup::follow(std::span<const int32_t> text) {
  const auto size = static_cast<int64_t>(text.size());
  for (; seen_ < size; ++seen_) {  // the end itself has no follower yet
    if (seen_ >= kLongest) long_[hash_before(text, seen_, kLongest)] = seen_;
    if (seen_ >= kShortest) short_[hash_before(text, seen_, kShortest)] = seen_;
  }
}

std::vector<int32_t> PromptLookup::draft(std::span<const int32_t> text, int64_t most) {
  follow(text);
  const auto size = static_cast<int64_t>(text.size());
  for (const int64_t count : {kLongest, kShortest}) {
    if (size <= count || most <= 0) continue;
    const auto& table = count == kLongest ? long_ : short_;
    const auto found = table.find(hash_before(text, size, count));
    if (found == table.end()) continue;
    const int64_t at = found->second;
    if (!std::equal(text.end() - count, text.end(), text.begin() + (at - count))) continue;
    const int64_t end = std::min(size, at + most);
    return {text.begin() + at, text.begin() + end};
  }
  return {};
}

}  // namespace godwit
