// A tiny model of the full architecture with a vocabulary of bytes, random weights and a liking for ending
// its turns; and an environment of a few turns for the mechanics.
#pragma once

#include <ATen/ATen.h>

#include <nlohmann/json.hpp>
#include <string>

#include "godwit/infer/model.h"
#include "godwit/rl/tool_environment.h"
#include "tests/model/tiny.h"

namespace godwit::test {

inline Tokenizer byte_tokenizer() {
  std::vector<std::string> ranks;
  for (int b = 0; b < 256; ++b) ranks.emplace_back(1, static_cast<char>(b));
  return Tokenizer::from_ranks(std::move(ranks));
}

// `ending`: logit of <|end_of_msg|> above the others', about. `expert_width`: latent and inner width of the
// experts, 0 for the tiny configuration's own.
inline LoadedModel tiny_policy(uint64_t seed, double ending = 6, int64_t expert_width = 0) {
  Tokenizer tokenizer = byte_tokenizer();
  ModelConfig config = tiny_config();
  config.vocab_size = tokenizer.vocab_size();
  config.max_position = 4096;
  if (expert_width > 0) config.moe.latent = config.moe.inner = expert_width;
  config.mla.nope_dim = 12;  // widths that our attention takes: multiples of 16
  config.mla.v_dim = 16;
  ModelWeights weights = init_weights(config, seed, at::kCPU, at::kFloat);
  // Quiet layers, so that the stream stays near the embeddings.
  for_each_param(config, weights, [](const ParamInfo& info, at::Tensor& value) {
    if (info.role == ParamRole::kMatrix || info.role == ParamRole::kExperts) value.mul_(0.4);
  });
  // A direction that all embeddings share reaches the head through the residual stream.
  const at::Tensor common = at::ones({config.hidden}) * 0.3;
  weights.embed.add_(common);
  weights.lm_head[tokenizer.special_id(kEndOfMsg)].add_(common *
                                                        (ending / 0.3 / static_cast<double>(config.hidden)));
  return {
      .config = config, .weights = std::move(weights), .tokenizer = std::move(tokenizer), .device = at::kCPU};
}

// "chatter": `turns` turns; each gets a user's line; solved if the letters e, a, t and o came up at least
// `letters` times in all.
class Chatter final : public rl::ToolEnvironment {
 public:
  Chatter(int64_t turns, int64_t letters)
      : ToolEnvironment({.turns = 99}), turns_(turns), letters_(letters) {}

 private:
  rl::Task begin(rl::Draws& draws) override {
    world = {{"turn", 0}, {"letters", 0}, {"topic", draws.between(0, 9)}};
    return {.messages = {rl::user_says("Tell me about " + std::to_string(world["topic"].get<int64_t>()) +
                                       ", <|end_of_msg|> and the rest of it.")},
            .tools = {},
            .base_tokens = 0};
  }
  rl::ToolAnswer call(const std::string& tool, const nlohmann::json&, rl::Draws&) override {
    return {.text = "no tool " + tool, .wrong = true};
  }
  rl::Reply respond(const std::string& text) override {
    int64_t letters = world["letters"];
    for (const char c : text) letters += std::string("eato").find(c) != std::string::npos;
    const int64_t turn = world["turn"].get<int64_t>() + 1;
    world["turn"] = turn;
    world["letters"] = letters;
    if (turn < turns_) return {.next = "And then? \xc3\xa9t\xc3\xa9 ", .done = false};
    return {.success = letters >= letters_ ? 1.0 : 0.0};
  }

  int64_t turns_, letters_;
};

inline void register_chatter() {
  rl::register_environment("chatter", [](const nlohmann::json& o) {
    return std::make_unique<Chatter>(o.value("turns", int64_t{3}), o.value("letters", int64_t{1}));
  });
}

}  // namespace godwit::test
