// Held-out documents for measuring loss: each token once, in the order of the data set, no overlap.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "godwit/data/dataset.h"
#include "godwit/data/packed_batch.h"

namespace godwit::data {

// Documents of up to `length` tokens stay whole; longer ones are cut into consecutive windows of that length,
// each without the context before it (its last target is still the next token of the document). Whole
// documents and last windows are packed together as long as they fit, so batches have up to `length` tokens.
// Batch i is a pure function of i: ranks may share the work in any way.
class EvalReader {
 public:
  EvalReader(std::shared_ptr<const TokenDataset> dataset, int64_t length);

  int64_t batches() const { return static_cast<int64_t>(first_.size()) - 1; }
  PackedBatch batch(int64_t i) const;

  // For bits per byte: the loss is a sum over targets(), the text has text_bytes(). The first token of each
  // document is no target (with a BOS token in the data that is the BOS itself, and nothing is lost).
  uint64_t targets() const { return targets_; }
  uint64_t text_bytes() const { return dataset_->text_bytes(); }

 private:
  std::shared_ptr<const TokenDataset> dataset_;
  std::vector<Segment> windows_;
  std::vector<size_t> first_{0};  // window of each batch, and the end
  uint64_t targets_ = 0;
};

}  // namespace godwit::data
