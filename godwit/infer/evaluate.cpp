#include "godwit/infer/evaluate.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "godwit/base/check.h"

namespace godwit {

double TextLoss::bits_per_byte() const {
  return bytes > 0 ? nats / std::log(2.0) / static_cast<double>(bytes) : 0.0;
}

TextEvaluation::TextEvaluation(const LoadedModel& model, int64_t window) : model_(model), window_(window) {
  check(window > 0, "evaluation: the window must have a token, got {}", window);
}

void TextEvaluation::add_document(std::span<const int32_t> ids) {
  if (ids.empty()) return;
  ++loss_.documents;
  for (const int32_t id : ids.subspan(1)) {
    ++loss_.tokens;
    if (!model_.tokenizer.is_special(id))
      loss_.bytes += static_cast<int64_t>(model_.tokenizer.token_bytes(id).size());
  }
  for (size_t begin = 0; begin + 1 < ids.size(); begin += window_) {
    const size_t n = std::min<size_t>(window_, ids.size() - 1 - begin);
    add_window(ids.subspan(begin, n), ids.subspan(begin + 1, n));
  }
}

void TextEvaluation::add_window(std::span<const int32_t> ids, std::span<const int32_t> targets) {
  if (static_cast<int64_t>(ids_.size() + ids.size()) > kEvaluationPiece) run();
  ids_.insert(ids_.end(), ids.begin(), ids.end());
  targets_.insert(targets_.end(), targets.begin(), targets.end());
  lengths_.push_back(static_cast<int64_t>(ids.size()));
}

void TextEvaluation::run() {
  if (ids_.empty()) return;
  const PackedBatch batch{.ids = at::tensor(ids_, at::kLong).to(model_.device),
                          .cu_seqlens = make_cu_seqlens(lengths_)};
  const at::Tensor targets = at::tensor(targets_, at::kLong);
  const at::Tensor losses = token_losses(model_.config, model_.weights, batch, targets);
  loss_.by_position.add(losses, targets, batch.cu_seqlens);
  ids_.clear();
  targets_.clear();
  lengths_.clear();
}

TextLoss TextEvaluation::finish() {
  run();
  loss_.nats = loss_.by_position.total_nats();
  return loss_;
}

}  // namespace godwit
