#include "godwit/data/eval_reader.h"

#include <algorithm>
#include <utility>

#include "godwit/base/check.h"

namespace godwit::data {

EvalReader::EvalReader(std::shared_ptr<const TokenDataset> dataset, int64_t length)
    : dataset_(std::move(dataset)) {
  check(length > 0, "evaluation in windows of {} tokens", length);
  const auto most = static_cast<uint64_t>(length);
  uint64_t filled = 0;
  for (uint64_t d = 0; d < dataset_->documents(); ++d) {
    const uint64_t tokens = dataset_->document_tokens(d);
    targets_ += dataset_->document_targets(d);
    for (uint64_t begin = 0; begin < tokens; begin += most) {
      const uint64_t window = std::min(most, tokens - begin);
      if (filled + window > most) {
        first_.push_back(windows_.size());
        filled = 0;
      }
      windows_.push_back({d, begin, window});
      filled += window;
    }
  }
  check(!windows_.empty(), "{} has no tokens", dataset_->path().string());
  first_.push_back(windows_.size());
}

PackedBatch EvalReader::batch(int64_t i) const {
  check(i >= 0 && i < batches(), "{}: evaluation batch {} of {}", dataset_->path().string(), i, batches());
  PackedBatch batch;
  for (size_t w = first_[i]; w < first_[i + 1]; ++w) batch.append(*dataset_, /*entry=*/0, windows_[w]);
  return batch;
}

}  // namespace godwit::data
