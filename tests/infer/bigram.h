// A model that knows bigrams: every sub-layer gives zero, so the hidden state is the token's embedding alone,
// and the head's row of a token's follower is that embedding.
#pragma once

#include <ATen/ATen.h>

#include <map>

#include "godwit/infer/model.h"
#include "tests/model/tiny.h"

namespace godwit::test {

inline LoadedModel bigram_model(const std::map<int32_t, int32_t>& next) {
  Tokenizer tokenizer = Tokenizer::load(GODWIT_FIXTURES "/tokenizer");
  ModelConfig config = tiny_config();
  config.vocab_size = tokenizer.vocab_size();
  config.mla.nope_dim = 12;  // widths that our attention takes: multiples of 16
  config.mla.v_dim = 16;
  ModelWeights weights = init_weights(config, 11, at::kCPU, at::kFloat);
  for_each_param(config, weights, [](const ParamInfo& info, at::Tensor& value) {
    if (info.role == ParamRole::kMatrix || info.role == ParamRole::kExperts) value.zero_();
  });
  // Of equal length, an embedding's largest product is that with itself.
  weights.embed = weights.embed / weights.embed.norm(2, 1, /*keepdim=*/true);
  weights.lm_head.zero_();
  for (const auto& [token, follower] : next) weights.lm_head[follower].copy_(weights.embed[token]);
  return {
      .config = config, .weights = std::move(weights), .tokenizer = std::move(tokenizer), .device = at::kCPU};
}

}  // namespace godwit::test
