// One model and one conversation with it: prompts are prefilled onto a carried state, tokens are drawn one by
// one.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "godwit/infer/sampler.h"
#include "godwit/model/forward.h"
#include "godwit/text/tokenizer.h"

namespace godwit {

// Tokens that are fed to the model in one piece; a longer prompt is prefilled piece by piece, so that memory
// stays flat.
inline constexpr int64_t kPrefillPiece = 2048;

struct LoadedModel {
  ModelConfig config;
  ModelWeights weights;
  Tokenizer tokenizer;
  at::Device device;
};

// A model directory: config.json, weights, tokenizer. The tokenizer's ids must fit the vocabulary. Without a
// dtype the weights keep the checkpoint's.
LoadedModel load_model(const std::string& directory, at::Device device,
                       std::optional<at::ScalarType> dtype = std::nullopt);

// What ends a text: [EOS], <|end_of_msg|> and the configuration's eos_token_id.
std::vector<int32_t> text_stop_ids(const LoadedModel& model);

struct GenerateOptions {
  SamplingParams sampling;
  int64_t max_tokens = 128;
  std::vector<int32_t> stop_ids = {};          // drawing one ends the text; it is not part of it
  std::vector<int32_t> allowed_specials = {};  // special tokens that may be drawn besides the stop ids
};

struct Generation {
  std::vector<int32_t> ids;
  std::vector<double> logprobs;
  std::string finish_reason;  // "stop" (a stop id), "length" (max_tokens) or "cancelled" (on_token)
  int64_t prompt_tokens = 0;
  double prefill_s = 0.0;
  double decode_s = 0.0;

  double tokens_per_s() const { return decode_s > 0 ? static_cast<double>(ids.size()) / decode_s : 0.0; }
};

class Session {
 public:
  explicit Session(const LoadedModel& model);

  // Feeds `prompt` after what the session has seen, then draws tokens. on_token is called with each as it
  // comes; returning false ends it. Special tokens are never drawn unless allowed. The state then
  // holds everything that was fed and drawn.
  Generation generate(std::span<const int32_t> prompt, const GenerateOptions& options,
                      const std::function<bool(int32_t)>& on_token = {});

  // Feeds `ids` alone; at least one. Logits [V] after the last, fp32 on the CPU.
  at::Tensor feed(std::span<const int32_t> ids);

  int64_t tokens() const { return state_.lengths[0]; }
  int64_t state_bytes() const { return state_.bytes(); }

 private:
  const LoadedModel& model_;
  ModelState state_;
};

}  // namespace godwit
