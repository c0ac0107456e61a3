// Small configurations of the full architecture for the tests: every mechanism on, everything tiny.
#pragma once

#include <string>
#include <vector>

#include "godwit/model/config.h"

namespace godwit::test {

// 5 layers: KDA (dense MLP), KDA, MLA, KDA, MLA; block AttnRes of 2 layers; 12 experts, top-3, latent 16.
inline ModelConfig tiny_config() {
  ModelConfig c;
  c.vocab_size = 61;
  c.hidden = 32;
  c.layers = 5;
  c.intermediate = 48;
  c.situ = true;
  c.situ_beta = 4.0;
  c.situ_linear_beta = 25.0;
  c.rms_norm_eps = 1e-5;
  c.initializer_range = 0.2;
  c.dtype = "float32";
  c.kda_layer = {true, true, false, true, false};
  c.kda = {.heads = 2, .head_dim = 16, .conv_kernel = 4, .full_rank_gate = true, .gate_lower_bound = -5.0};
  c.mla = {.heads = 2,
           .q_lora_rank = 24,
           .kv_lora_rank = 16,
           .nope_dim = 8,
           .rope_dim = 4,
           .v_dim = 8,
           .gate = MlaGate::kOutput};
  c.moe = {.experts = 12,
           .experts_per_token = 3,
           .shared_experts = 2,
           .inner = 8,
           .latent = 16,
           .latent_norm = true,
           .first_dense = 1};
  c.attn_res = AttnResKind::kBlock;
  c.attn_res_block = 2;
  validate(c, "tiny");
  return c;
}

struct NamedConfig {
  std::string name;
  ModelConfig config;
};

// The tiny model under every option.
inline std::vector<NamedConfig> tiny_variants() {
  std::vector<NamedConfig> all = {{"k3", tiny_config()}};
  const auto add = [&](const char* name, auto change) {
    ModelConfig c = tiny_config();
    change(c);
    validate(c, name);
    all.push_back({name, c});
  };
  add("full_attn_res", [](ModelConfig& c) { c.attn_res = AttnResKind::kFull; });
  add("router_latent", [](ModelConfig& c) { c.moe.router_input = RouterInput::kLatent; });
  add("local_global", [](ModelConfig& c) {
    c.mla.gate = MlaGate::kLocalGlobal;
    c.mla.local_window = 5;
  });
  add("rotary", [](ModelConfig& c) { c.mla.rotary = true; });
  add("window", [](ModelConfig& c) { c.mla.window = 7; });
  add("groups", [](ModelConfig& c) {
    c.moe.groups = 4;
    c.moe.topk_groups = 2;
  });
  add("kimi_linear", [](ModelConfig& c) {
    c.model_type = "kimi_linear";
    c.situ = false;
    c.attn_res = AttnResKind::kNone;
    c.kda.full_rank_gate = false;
    c.kda.gate_lower_bound = 0.0;
    c.mla.q_lora_rank = 0;
    c.mla.gate = MlaGate::kNone;
    c.moe.latent = 0;
    c.moe.latent_norm = false;
    c.moe.shared_experts = 1;
    c.moe.scale = 2.446;
  });
  return all;
}

}  // namespace godwit::test
