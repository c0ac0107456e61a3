#include "godwit/data/token_stream.h"

#include <algorithm>
#include <utility>

#include "godwit/base/check.h"
#include "godwit/base/rng.h"
#include "godwit/data/permutation.h"

namespace godwit::data {

TokenStream::TokenStream(std::shared_ptr<const TokenDataset> dataset, uint64_t key)
    : dataset_(std::move(dataset)), key_(key), tokens_per_epoch_(dataset_->tokens()) {
  check(tokens_per_epoch_ > 0, "{} has no tokens", dataset_->path().string());
}

TokenStream::TokenStream(std::shared_ptr<const TokenDataset> dataset, std::vector<Segment> segments,
                         uint64_t key)
    : dataset_(std::move(dataset)), list_(std::move(segments)), key_(key) {
  for (const auto& segment : *list_) tokens_per_epoch_ += segment.length;
  check(tokens_per_epoch_ > 0, "{} has no tokens", dataset_->path().string());
}

Segment TokenStream::segment(uint64_t i) const {
  if (list_) return (*list_)[i];
  return {i, 0, dataset_->document_tokens(i)};
}

uint64_t TokenStream::shuffled(uint64_t epoch, uint64_t i) const {
  return Permutation(segments(), random_bits(key_, /*stream=*/1, epoch))(i);
}

std::shared_ptr<const TokenStream::Epoch> TokenStream::epoch(uint64_t number) const {
  const std::lock_guard lock(mutex_);
  for (const auto& known : epochs_) {
    if (known->number == number) return known;
  }
  auto made = std::make_shared<Epoch>(Epoch{number, {}});
  made->ends.reserve(segments());
  const Permutation order(segments(), random_bits(key_, /*stream=*/1, number));
  uint64_t end = 0;
  for (uint64_t i = 0; i < segments(); ++i) made->ends.push_back(end += segment(order(i)).length);
  if (epochs_.size() == 2) epochs_.erase(epochs_.begin());
  epochs_.push_back(made);
  return made;
}

void TokenStream::read(uint64_t first, uint64_t count,
                       const std::function<void(const Segment&)>& visit) const {
  while (count > 0) {
    const auto current = epoch(first / tokens_per_epoch_);
    uint64_t offset = first % tokens_per_epoch_;
    auto end = std::ranges::upper_bound(current->ends, offset);
    for (; count > 0 && end != current->ends.end(); ++end) {
      const Segment whole =
          segment(shuffled(current->number, static_cast<uint64_t>(end - current->ends.begin())));
      if (whole.length == 0) continue;
      const uint64_t skip = whole.length - (*end - offset);
      const uint64_t length = std::min(whole.length - skip, count);
      visit({whole.document, whole.begin + skip, length});
      offset += length;
      first += length;
      count -= length;
    }
  }
}

}  // namespace godwit::data
