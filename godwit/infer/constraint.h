// Holds what is drawn to a grammar (turn_grammar.h): JSON of a schema, calls of tools.
#pragma once

#include <atomic>
#include <memory>

#include "godwit/infer/engine.h"
#include "godwit/text/token_filter.h"

namespace godwit {

class GrammarConstraint final : public TokenConstraint {
 public:
  // `budget`: tokens that may be drawn. `hurried` is set when it has ruled
  // out what the grammar would have allowed; may be null.
  GrammarConstraint(std::shared_ptr<const Grammar> grammar, std::shared_ptr<const TokenTrie> trie,
                    int64_t budget, std::shared_ptr<std::atomic<bool>> hurried)
      : filter_(std::move(grammar), std::move(trie), budget), hurried_(std::move(hurried)) {}

  void forbid(at::Tensor& forbidden) override;
  void accept(int32_t id) override { filter_.accept(id); }

 private:
  TokenFilter filter_;
  std::shared_ptr<std::atomic<bool>> hurried_;
};

}  // namespace godwit
