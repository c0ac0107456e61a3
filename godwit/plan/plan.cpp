#include "godwit/plan/plan.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

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
  if (has("self_attn.")) return "attention";  // KDA or MLA: the layer's kind decides
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

// How the released layout stores a parameter. MXFP4 packs two values a byte and adds one scale byte per 32.
struct Stored {
  const char* dtype;
  int64_t bytes;
};

Stored stored_as(const ModelConfig& config, const ParamInfo& info) {
  const int64_t n = stored_numel(config, info);
  if (info.role == ParamRole::kExperts && config.model_type == "kimi_k3" && config.dtype == "bfloat16")
    return {"mxfp4", n / 2 + n / 32};
  if (info.keep_fp32 || config.dtype == "float32") return {"f32", n * 4};
  return {"bf16", n * 2};
}

// Module names tell the two kinds of token mixer apart by the layer's kind.
std::string module_in(const ModelConfig& config, const ParamInfo& info) {
  const std::string module = module_of(info);
  if (module != "attention") return module;
  const size_t at = info.name.find("layers.") + 7;
  return config.kda_layer[std::stoll(info.name.substr(at))] ? "kda" : "mla";
}

StateBytes state_bytes(const ModelConfig& config) {
  StateBytes state;
  for (int64_t i = 0; i < config.layers; ++i) {
    if (config.kda_layer[i]) {
      const int64_t inner = config.kda.heads * config.kda.head_dim;
      state.kda_fp32 += inner * config.kda.head_dim * 4;
      state.conv += 3 * inner * (config.kda.conv_kernel - 1) * 2;
    } else {
      state.mla_bf16_per_token += (config.mla.kv_lora_rank + config.mla.rope_dim) * 2;
    }
  }
  return state;
}

// Share of E experts that at least one of `batch` tokens chose, k of E each, evenly.
double experts_touched(const MoeConfig& moe, int64_t batch) {
  const double missed = 1.0 - static_cast<double>(moe.experts_per_token) / static_cast<double>(moe.experts);
  return 1.0 - std::pow(missed, static_cast<double>(batch));
}

}  // namespace

Plan make_plan(const ModelConfig& config, int64_t context, int64_t decode_batch) {
  Plan plan;
  plan.context = context;
  plan.decode_batch = decode_batch;
  ModelWeights weights = weight_structure(config);
  weights.vision.reset();  // counted apart: no token passes through it
  ParameterCount& count = plan.parameters;
  int64_t used_matrices = 0, head = 0, expert_bytes = 0, other_bytes = 0;
  for_each_param(config, weights, [&](const ParamInfo& info, at::Tensor&) {
    const int64_t n = stored_numel(config, info);
    const Stored stored = stored_as(config, info);
    const std::string module = module_in(config, info);
    const bool experts = info.role == ParamRole::kExperts;
    // A tied table is the head as well; otherwise a token reads one row of the embedding.
    const bool looked_up = info.role == ParamRole::kEmbedding && !config.tie_embeddings;
    const int64_t used = looked_up ? 0 : experts ? n / config.moe.experts * config.moe.experts_per_token : n;
    count.total += n;
    count.by_module[module] += n;
    count.active += used;
    if (used > 0) count.active_by_module[module] += used;
    plan.checkpoint_bytes += stored.bytes;
    plan.checkpoint_bytes_by_dtype[stored.dtype] += stored.bytes;
    if (info.role == ParamRole::kMatrix || experts) used_matrices += used;
    if (info.role == (config.tie_embeddings ? ParamRole::kEmbedding : ParamRole::kHead)) head += n;
    if (experts) expert_bytes += stored.bytes;
    if (!experts && !looked_up) other_bytes += stored.bytes;
  });
  const VisionCount vision = count_vision(config);
  count.vision = vision.tower;
  count.total += vision.tower + vision.projector;
  count.active_without_head = count.active - head;
  if (config.vision) {
    const int64_t bytes = (vision.tower + vision.projector) * 2;
    count.by_module["vision_tower"] = vision.tower;
    count.by_module["projector"] = vision.projector;
    plan.checkpoint_bytes += bytes;
    plan.checkpoint_bytes_by_dtype["bf16"] += bytes;
  }
  plan.state = state_bytes(config);

  const double matrices = 2.0 * (static_cast<double>(used_matrices) + static_cast<double>(head));
  plan.flops.prefill = matrices + attention_flops(config, 0.5 * static_cast<double>(context), false);
  plan.flops.train = 3.0 * plan.flops.prefill;
  plan.flops.decode = matrices + attention_flops(config, static_cast<double>(context), true);

  const auto batch = static_cast<double>(decode_batch);
  DecodeBytes& moved = plan.decode_bytes;
  if (expert_bytes > 0)
    moved.routed_experts =
        static_cast<double>(expert_bytes) * experts_touched(config.moe, decode_batch) / batch;
  moved.other_weights = static_cast<double>(other_bytes) / batch;
  moved.kda_state = 2.0 * static_cast<double>(plan.state.kda_fp32);
  moved.conv_state = 2.0 * static_cast<double>(plan.state.conv);
  const int64_t rows = config.mla.window > 0 ? std::min(context, config.mla.window) : context;
  moved.mla_cache = static_cast<double>(plan.state.mla_bf16_per_token) * static_cast<double>(rows + 1);
  return plan;
}

}  // namespace godwit
