// The endless stream behind one data set of a loader: segments of documents in an order shuffled anew each
// epoch.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "godwit/data/dataset.h"

namespace godwit::data {

class TokenStream {
 public:
  // All documents of the data set.
  TokenStream(std::shared_ptr<const TokenDataset> dataset, uint64_t key);
  // The given segments.
  TokenStream(std::shared_ptr<const TokenDataset> dataset, std::vector<Segment> segments, uint64_t key);

  uint64_t tokens_per_epoch() const { return tokens_per_epoch_; }

  // Calls `visit` with the stretches of documents that make up the stream's tokens first .. first + count,
  // none of them empty.
  void read(uint64_t first, uint64_t count, const std::function<void(const Segment&)>& visit) const;

  const TokenDataset& dataset() const { return *dataset_; }

 private:
  // One epoch: where each segment of the shuffled order ends. 8 bytes a segment; the two newest are kept.
  struct Epoch {
    uint64_t number;
    std::vector<uint64_t> ends;
  };
  uint64_t segments() const { return list_ ? list_->size() : dataset_->documents(); }
  Segment segment(uint64_t i) const;
  uint64_t shuffled(uint64_t epoch, uint64_t i) const;
  std::shared_ptr<const Epoch> epoch(uint64_t number) const;

  std::shared_ptr<const TokenDataset> dataset_;
  std::optional<std::vector<Segment>> list_;
  uint64_t key_;
  uint64_t tokens_per_epoch_ = 0;
  mutable std::mutex mutex_;
  mutable std::vector<std::shared_ptr<const Epoch>> epochs_;
};

}  // namespace godwit::data
