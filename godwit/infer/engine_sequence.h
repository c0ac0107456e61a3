// What the engine's own files share: a sequence, and what a step makes of it.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "godwit/infer/device_sampler.h"
#include "godwit/infer/engine.h"
#include "godwit/infer/prompt_lookup.h"

namespace godwit {

// One choice of a request.
struct Engine::Sequence {
  std::shared_ptr<const Request> request;
  int64_t id = 0;  // of the request
  int64_t choice = 0;
  SamplingParams sampling;
  std::vector<int32_t> tokens;         // the prompt and what was drawn; empty until a place is sought
  std::shared_ptr<PromptMedia> media;  // shared by the choices
  int64_t slot = -1;
  std::vector<int64_t> boundaries;  // of its prompt, where its state goes to the prefix cache; ascending
  std::optional<SwappedState> swapped;
  std::chrono::steady_clock::time_point submitted = std::chrono::steady_clock::now();
  at::Tensor forbidden, forbidden_there;  // there: on the model's device, where tokens are drawn on it
  at::Tensor forbidden_early;             // before min_tokens; undefined where there is no such time
  std::unique_ptr<TokenConstraint> constraint;
  TokenHistory history;
  bool uses_history = false;
  PromptLookup lookup;
  bool finished = false;
  int64_t cached = 0;

  [[nodiscard]] int64_t prompt_size() const { return static_cast<int64_t>(request->prompt.size()); }
  [[nodiscard]] int64_t size() const { return static_cast<int64_t>(tokens.size()); }
  [[nodiscard]] int64_t drawn() const { return tokens.empty() ? 0 : size() - prompt_size(); }
  [[nodiscard]] bool early() const { return forbidden_early.defined() && drawn() < request->min_tokens; }
  [[nodiscard]] bool draws_on_device() const {
    return godwit::draws_on_device(sampling) && !constraint && !request->forced &&
           request->top_logprobs == 0 && !early();
  }
};

// Tokens [from, to) of a sequence, fed in one step.
struct Engine::Piece {
  Sequence* sequence = nullptr;
  int64_t from = 0;
  int64_t to = 0;
  std::vector<int32_t> drafts = {};   // behind the sequence's last token; they take the step forms too
  std::vector<KdaState> before = {};  // with drafts: to go back to
  [[nodiscard]] int64_t tokens() const { return to - from + static_cast<int64_t>(drafts.size()); }
  [[nodiscard]] bool steps() const { return to - from == 1; }
  // The last token that its sequence drew.
  [[nodiscard]] bool draws() const { return steps() && to == sequence->size() && sequence->drawn() > 0; }
};

// A sequence that draws: from the row of its last token and, while what it draws is what was drafted, from
// the rows of the drafts.
struct Engine::Drawing {
  const Piece* piece = nullptr;
  int64_t call_row = 0;  // of its first token in the forward call
  int64_t row = 0;       // of its first logits
  int64_t taken = 0;     // tokens drawn so far
  bool goes_on = true;

  int64_t drafts() const { return static_cast<int64_t>(piece->drafts.size()); }
  // Of its row `i`, before any was taken.
  DeviceDraw on_device(at::Device device, int64_t i) const {
    Sequence& s = *piece->sequence;
    if (!s.forbidden_there.defined()) s.forbidden_there = s.forbidden.to(device);
    return {.row = row + i, .params = &s.sampling, .position = s.size() + i, .forbidden = s.forbidden_there};
  }
};

// What came of a draw.
struct Engine::Outcome {
  Outcome() = default;
  Outcome(const Sampled& s, std::string fault)
      : token{.id = static_cast<int32_t>(s.id), .logprob = s.logprob, .policy_logprob = s.policy_logprob},
        error(std::move(fault)) {}
  DrawnToken token;
  std::string error;
};

}  // namespace godwit
