#include "godwit/data/ahead.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace godwit::data {

void SequencesAhead::wait() {
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void SequencesAhead::start(uint64_t first, uint64_t count, int threads, const Make& make) {
  if (first == first_ && count == made_.size()) return;
  wait();
  first_ = first;
  made_.assign(count, std::nullopt);
  next_ = 0;
  const auto work = [this, make] {
    for (size_t i = next_++; i < made_.size(); i = next_++) {
      try {
        made_[i] = make(first_ + i);
      } catch (const std::exception&) {  // stays unmade
      }
    }
  };
  const auto wanted = std::clamp<uint64_t>(static_cast<uint64_t>(std::max(threads, 1)), 1, count);
  for (uint64_t t = 0; t < wanted; ++t) threads_.emplace_back(work);
}

std::optional<PackedBatch> SequencesAhead::take(uint64_t n) {
  if (n < first_ || n - first_ >= made_.size()) return std::nullopt;
  wait();
  return std::exchange(made_[n - first_], std::nullopt);
}

}  // namespace godwit::data
