// Loss of a model on documents: nats a token, bits a byte, loss by position.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "godwit/infer/model.h"
#include "godwit/model/evaluate.h"

namespace godwit {

struct TextLoss {
  int64_t documents = 0;
  int64_t tokens = 0;  // targets: all but the first of each document
  int64_t bytes = 0;   // of text that the targets stand for; special tokens have none
  double nats = 0.0;   // sum
  LossByPosition by_position;

  double nats_per_token() const { return tokens > 0 ? nats / static_cast<double>(tokens) : 0.0; }
  double bits_per_byte() const;  // the loss of special tokens included
};

// Documents longer than `window` are cut into windows of that many tokens, each without the context before
// it; the last target of a window is the token after it, so every token but a document's first is a target
// once.
class TextEvaluation {
 public:
  TextEvaluation(const LoadedModel& model, int64_t window);

  void add_document(std::span<const int32_t> ids);
  // Of what was added. Runs what is waiting.
  TextLoss finish();
  int64_t tokens() const { return loss_.tokens; }  // added so far

 private:
  void add_window(std::span<const int32_t> ids, std::span<const int32_t> targets);
  void run();

  const LoadedModel& model_;
  int64_t window_;
  TextLoss loss_;
  std::vector<int64_t> ids_, targets_, lengths_;  // waiting
};

}  // namespace godwit
