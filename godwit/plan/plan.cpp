#include "godwit/plan/plan.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "godwit/model/weights.h"

namespace godwit {
namespace {

int64_t numel(const ParamInfo& info) {
  int64_t n = 1;
  for (const int64_t size : info.shape) n *= size;
  return n;
}

// Values a checkpoint holds for it: the released K3 layout pads A_log to a multiple of 128 with zeros.
int64_t stored_numel(const ModelConfig& config, const ParamInfo& info) {
  const int64_t n = numel(info);
  return config.model_type == "kimi_k3" && info.name.ends_with("A_log") ? (n + 127) / 128 * 128 : n;
}

// Module of a parameter, for the table by module.
std::string module_of(const ParamInfo& info) {
  const auto has = [&](const char* part) { return info.name.find(part) != std::string::npos; };
  if (info.role == ParamRole::kEmbedding) return "embedding";
  if (info.role == ParamRole::kHead) return "lm_head";
  if (info.role == ParamRole::kExperts) return "routed_experts";
  if (has("_res_")) return "attn_res";
  if (has("shared_experts")) return "shared_experts";
  if (has("block_sparse_moe.gate")) return "router";
  if (has("routed_expert_")) return "latent_projections";
  if (has(".mlp.")) return "dense_mlp";
  if (has("self_attn.kv_") || has("self_attn.q_a") || has("self_attn.q_b")) return "mla";
  if (has("self_attn.")) return "attention";  // refined by layer kind below
  return "norms";
}

struct VisionCount {
  int64_t tower = 0;
  int64_t projector = 0;
};

VisionCount count_vision(const ModelConfig& config) {
  if (!config.vision) return {};
  const VisionConfig& v = *config.vision;
  const int64_t merged = v.hidden * v.merge_height * v.merge_width;
  const int64_t block =
      3 * v.qkv_hidden * v.hidden + v.hidden * v.qkv_hidden + 2 * v.hidden * v.intermediate + 2 * v.hidden;
  return {.tower = v.hidden * 3 * v.patch_size * v.patch_size +
                   v.pos_emb_height * v.pos_emb_width * v.hidden + v.layers * block + v.hidden,
          .projector = merged * merged + config.hidden * merged + config.hidden};
}

// Operations of the KDA recurrence for one token and layer, chunk form with chunks of 16 (report
// section 2.1): state products 6 K V, in-chunk products 8 C K; one step: 7 K V.
double kda_core_flops(const KdaConfig& kda, bool step) {
  const double K = static_cast<double>(kda.head_dim), H = static_cast<double>(kda.heads);
  return H * (step ? 7.0 * K * K : 6.0 * K * K + 8.0 * 16.0 * K);
}

// Operations of one MLA layer's attention for a token that sees `keys` keys.
double mla_core_flops(const MlaConfig& mla, double keys, bool absorbed) {
  if (mla.window > 0) keys = std::min(keys, static_cast<double>(mla.window));
  const double width =
      absorbed ? 2.0 * mla.kv_lora_rank + mla.rope_dim : static_cast<double>(mla.qk_dim() + mla.v_dim);
  return 2.0 * mla.heads * width * keys;
}

double attention_flops(const ModelConfig& config, double keys, bool decode) {
  double total = 0;
  for (int64_t i = 0; i < config.layers; ++i) {
    total +=
        config.kda_layer[i] ? kda_core_flops(config.kda, decode) : mla_core_flops(config.mla, keys, decode);
  }
  return total;
}

// Stored bytes in the released layout: MXFP4 packs two values a byte and one scale byte per 32.
int64_t stored_bytes(const ModelConfig& config, const ParamInfo& info) {
  const int64_t n = stored_numel(config, info);
  if (info.role == ParamRole::kExperts && config.model_type == "kimi_k3" && config.dtype == "bfloat16")
    return n / 2 + n / 32;
  return n * (info.keep_fp32 || config.dtype == "float32" ? 4 : 2);
}

}  // namespace

Plan make_plan(const ModelConfig& config, int64_t context) {
  Plan plan;
  plan.context = context;
  ModelWeights weights = weight_structure(config);
  ParameterCount& count = plan.parameters;
  int64_t embedding = 0, head = 0, used_matrices = 0;
  for_each_param(config, weights, [&](const ParamInfo& info, at::Tensor&) {
    const int64_t n = stored_numel(config, info);
    count.total += n;
    plan.checkpoint_bytes += stored_bytes(config, info);
    std::string module = module_of(info);
    if (module == "attention") {
      const size_t at = info.name.find("layers.") + 7;
      module = config.kda_layer[std::stoll(info.name.substr(at))] ? "kda" : "mla";
    }
    count.by_module[module] += n;
    if (info.role == ParamRole::kEmbedding) embedding += n;
    if (info.role == ParamRole::kHead) head += n;
    const bool experts = info.role == ParamRole::kExperts;
    const int64_t used = experts ? n / config.moe.experts * config.moe.experts_per_token : n;
    if (info.role == ParamRole::kMatrix || experts) used_matrices += used;
    count.active += used;
  });
  const VisionCount vision = count_vision(config);
  count.vision = vision.tower;
  count.total += vision.tower + vision.projector;
  plan.checkpoint_bytes += (vision.tower + vision.projector) * 2;
  if (config.vision) {
    count.by_module["vision_tower"] = vision.tower;
    count.by_module["projector"] = vision.projector;
  }
  if (config.tie_embeddings) head = embedding;
  if (!config.tie_embeddings) count.active -= embedding;  // of the table a token reads one row
  count.active_without_head = count.active - head;

  for (int64_t i = 0; i < config.layers; ++i) {
    if (config.kda_layer[i]) {
      const int64_t inner = config.kda.heads * config.kda.head_dim;
      plan.state.kda_fp32 += inner * config.kda.head_dim * 4;
      plan.state.conv += 3 * inner * (config.kda.conv_kernel - 1) * 2;
    } else {
      plan.state.mla_bf16_per_token += (config.mla.kv_lora_rank + config.mla.rope_dim) * 2;
    }
  }
  const double matrices = 2.0 * (static_cast<double>(used_matrices) + static_cast<double>(head));
  plan.flops.prefill = matrices + attention_flops(config, 0.5 * static_cast<double>(context), false);
  plan.flops.train = 3.0 * plan.flops.prefill;
  plan.flops.decode = matrices + attention_flops(config, static_cast<double>(context), true);
  return plan;
}

}  // namespace godwit
