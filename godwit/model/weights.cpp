#include "godwit/model/weights.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>

#include "godwit/base/rng.h"

namespace godwit {
namespace {

constexpr std::string_view kProjectorNorm = "mm_projector.post_norm.weight";

uint64_t hash_name(const std::string& name) {
  uint64_t hash = 0xcbf29ce484222325ULL;  // FNV-1a
  for (const unsigned char c : name) hash = (hash ^ c) * 0x100000001b3ULL;
  return hash;
}

// Walks one layer; `at` prepends the layer's prefix.
class Visitor {
 public:
  Visitor(const ModelConfig& config, const ParamVisitor& visit) : c_(config), visit_(visit) {}

  void matrix(const std::string& name, Matrix& value, int64_t out, int64_t in, int64_t head_rows = 0) const {
    visit_({.name = name,
            .role = ParamRole::kMatrix,
            .shape = {out, in},
            .head_rows = head_rows,
            .may_pack = true,
            .is_matrix = true},
           value);
  }
  void matrix(const std::string& name, at::Tensor& value, int64_t out, int64_t in,
              int64_t head_rows = 0) const {  // the vision tower's: never packed
    visit_({.name = name, .role = ParamRole::kMatrix, .shape = {out, in}, .head_rows = head_rows}, value);
  }
  void kept_matrix(const std::string& name, Matrix& value, int64_t out, int64_t in,
                   int64_t head_rows = 0) const {
    visit_({.name = name,
            .role = ParamRole::kMatrix,
            .shape = {out, in},
            .head_rows = head_rows,
            .is_matrix = true},
           value);
  }
  void norm(const std::string& name, at::Tensor& value, int64_t size, bool fp32 = false) const {
    visit_(
        {.name = name, .role = ParamRole::kNorm, .shape = {size}, .weight_decay = false, .keep_fp32 = fp32},
        value);
  }
  void table(const std::string& name, Matrix& value, ParamRole role) const {
    visit_({.name = name,
            .role = role,
            .shape = {c_.vocab_size, c_.hidden},
            .may_pack = role == ParamRole::kHead,
            .is_matrix = true},
           value);
  }
  void residual(const std::string& name, at::Tensor& norm_weight, at::Tensor& query) const {
    norm(name + "_res_norm.weight", norm_weight, c_.hidden);
    visit_({.name = name + "_res_proj.weight",
            .role = ParamRole::kQuery,
            .shape = {c_.hidden},
            .weight_decay = false},
           query);
  }

  void kda(const std::string& at, KdaWeights& w) const {
    const int64_t K = c_.kda.head_dim, inner = c_.kda.heads * K, D = c_.hidden;
    matrix(at + "q_proj.weight", w.q_proj, inner, D, K);
    matrix(at + "k_proj.weight", w.k_proj, inner, D, K);
    matrix(at + "v_proj.weight", w.v_proj, inner, D, K);
    for (auto [name, value] :
         {std::pair{"q_conv1d", &w.q_conv}, {"k_conv1d", &w.k_conv}, {"v_conv1d", &w.v_conv}}) {
      visit_({.name = at + name + ".weight",
              .role = ParamRole::kConv,
              .shape = {inner, c_.kda.conv_kernel},
              .keep_fp32 = true},
             *value);
    }
    decay(at + "A_log", w.A_log, c_.kda.heads);
    matrix(at + "f_a_proj.weight", w.f_a, K, D);
    matrix(at + "f_b_proj.weight", w.f_b, inner, K);
    decay(at + "dt_bias", w.dt_bias, inner);
    matrix(at + "b_proj.weight", w.b_proj, c_.kda.heads, D);
    if (c_.kda.full_rank_gate) {
      matrix(at + "g_proj.weight", w.g_proj, inner, D);
    } else {
      matrix(at + "g_a_proj.weight", w.g_a, K, D);
      matrix(at + "g_b_proj.weight", w.g_b, inner, K);
    }
    norm(at + "o_norm.weight", w.o_norm, K, /*fp32=*/true);
    matrix(at + "o_proj.weight", w.o_proj, D, inner);
  }

  void mla(const std::string& at, MlaWeights& w) const {
    const MlaConfig& m = c_.mla;
    if (m.q_lora_rank > 0) {
      matrix(at + "q_a_proj.weight", w.q_a, m.q_lora_rank, c_.hidden);
      norm(at + "q_a_layernorm.weight", w.q_a_norm, m.q_lora_rank);
      matrix(at + "q_b_proj.weight", w.q_b, m.heads * m.qk_dim(), m.q_lora_rank, m.qk_dim());
    } else {
      matrix(at + "q_proj.weight", w.q_proj, m.heads * m.qk_dim(), c_.hidden, m.qk_dim());
    }
    matrix(at + "kv_a_proj_with_mqa.weight", w.kv_a, m.kv_lora_rank + m.rope_dim, c_.hidden);
    norm(at + "kv_a_layernorm.weight", w.kv_a_norm, m.kv_lora_rank);
    kept_matrix(at + "kv_b_proj.weight", w.kv_b, m.heads * (m.nope_dim + m.v_dim), m.kv_lora_rank,
                m.nope_dim + m.v_dim);
    if (m.gate != MlaGate::kNone) matrix(at + "g_proj.weight", w.g_proj, m.heads * m.v_dim, c_.hidden);
    matrix(at + "o_proj.weight", w.o_proj, c_.hidden, m.heads * m.v_dim);
  }

  void mlp(const std::string& at, MlpWeights& w, int64_t inner) const {
    matrix(at + "gate_proj.weight", w.gate, inner, c_.hidden);
    matrix(at + "up_proj.weight", w.up, inner, c_.hidden);
    matrix(at + "down_proj.weight", w.down, c_.hidden, inner);
  }

  void vision(const VisionConfig& v, VisionWeights& w) const {
    matrix("vision_tower.patch_embed.proj.weight", w.patch_proj, v.hidden, 3 * v.patch_size * v.patch_size);
    visit_({.name = "vision_tower.patch_embed.pos_emb.weight",
            .role = ParamRole::kEmbedding,
            .shape = {v.pos_emb_height, v.pos_emb_width, v.hidden}},
           w.pos_emb);
    for (size_t i = 0; i < w.blocks.size(); ++i) {
      const std::string at = "vision_tower.encoder.blocks." + std::to_string(i) + ".";
      VisionBlockWeights& block = w.blocks[i];
      norm(at + "norm0.weight", block.norm0, v.hidden);
      norm(at + "norm1.weight", block.norm1, v.hidden);
      matrix(at + "wqkv.weight", block.wqkv, 3 * v.qkv_hidden, v.hidden, v.head_dim());
      matrix(at + "wo.weight", block.wo, v.hidden, v.qkv_hidden);
      matrix(at + "mlp.fc0.weight", block.fc0, v.intermediate, v.hidden);
      matrix(at + "mlp.fc1.weight", block.fc1, v.hidden, v.intermediate);
    }
    norm("vision_tower.encoder.final_layernorm.weight", w.final_norm, v.hidden);
    const int64_t merged = v.hidden * v.merge();
    matrix("mm_projector.proj.0.weight", w.proj0, merged, merged);
    matrix("mm_projector.proj.2.weight", w.proj2, c_.hidden, merged);
    norm(std::string(kProjectorNorm), w.post_norm, c_.hidden);
  }

  void moe(const std::string& at, MoeWeights& w) const {
    const MoeConfig& m = c_.moe;
    const int64_t width = m.latent > 0 ? m.latent : c_.hidden;
    kept_matrix(at + "gate.weight", w.router, m.experts,
                m.router_input == RouterInput::kLatent ? m.latent : c_.hidden);
    visit_({.name = at + "gate.e_score_correction_bias",
            .role = ParamRole::kRouterBias,
            .shape = {m.experts},
            .weight_decay = false,
            .keep_fp32 = true},
           w.router_bias);
    if (m.latent > 0) {
      matrix(at + "routed_expert_down_proj.weight", w.down, m.latent, c_.hidden);
      if (m.latent_norm) norm(at + "routed_expert_norm.weight", w.norm, m.latent);
      matrix(at + "routed_expert_up_proj.weight", w.up, c_.hidden, m.latent);
    }
    if (w.shared) mlp(at + "shared_experts.", *w.shared, m.shared_experts * m.inner);
    experts(at + "experts.w1.weight", w.w1, m.inner, width);
    experts(at + "experts.w3.weight", w.w3, m.inner, width);
    experts(at + "experts.w2.weight", w.w2, width, m.inner);
  }

 private:
  void decay(const std::string& name, at::Tensor& value, int64_t size) const {
    visit_(
        {.name = name, .role = ParamRole::kDecay, .shape = {size}, .weight_decay = false, .keep_fp32 = true},
        value);
  }
  void experts(const std::string& name, Matrix& value, int64_t out, int64_t in) const {
    visit_({.name = name, .role = ParamRole::kExperts, .shape = {c_.moe.experts, out, in}, .is_matrix = true},
           value);
  }

  const ModelConfig& c_;
  const ParamVisitor& visit_;
};

at::Tensor initial_value(const ModelConfig& config, const ParamInfo& info, at::Generator& generator) {
  const auto fp32 = at::TensorOptions().dtype(at::kFloat);
  const bool a_log = info.name.ends_with("A_log");
  switch (info.role) {
    case ParamRole::kNorm:
      if (info.name == kProjectorNorm) return at::full(info.shape, config.initializer_range, fp32);
      return at::ones(info.shape, fp32);
    case ParamRole::kQuery:
    case ParamRole::kRouterBias:
      return at::zeros(info.shape, fp32);
    case ParamRole::kDecay: {
      if (a_log && config.kda.gate_lower_bound < 0) return at::zeros(info.shape, fp32);
      const at::Tensor u = at::rand(info.shape, generator, fp32);
      if (a_log) return at::log(1.0 + 15.0 * u);
      const at::Tensor dt = at::exp(std::log(1e-3) + u * (std::log(1e-1) - std::log(1e-3))).clamp_min(1e-4);
      return dt + at::log(-at::expm1(-dt));  // inverse softplus
    }
    case ParamRole::kConv: {  // as PyTorch's depthwise Conv1d: U(-1/sqrt(W), 1/sqrt(W))
      const double bound = 1.0 / std::sqrt(static_cast<double>(info.shape[1]));
      return (at::rand(info.shape, generator, fp32) * 2.0 - 1.0) * bound;
    }
    case ParamRole::kMatrix:
    case ParamRole::kExperts:
    case ParamRole::kEmbedding:
    case ParamRole::kHead:
      return at::randn(info.shape, generator, fp32) * config.initializer_range;
  }
  return {};
}

}  // namespace

ModelWeights weight_structure(const ModelConfig& config) {
  ModelWeights weights;
  if (config.vision) weights.vision.emplace().blocks.resize(config.vision->layers);
  weights.layers.resize(config.layers);
  for (int64_t i = 0; i < config.layers; ++i) {
    LayerWeights& layer = weights.layers[i];
    if (config.kda_layer[i])
      layer.kda.emplace();
    else
      layer.mla.emplace();
    if (!config.is_moe(i)) {
      layer.mlp.emplace();
      continue;
    }
    layer.moe.emplace();
    if (config.moe.shared_experts > 0) layer.moe->shared.emplace();
  }
  return weights;
}

void for_each_param(const ModelConfig& config, ModelWeights& weights, const ParamVisitor& visit) {
  const Visitor v(config, visit);
  const std::string model = config.prefix() + "model.";
  const bool residuals = config.attn_res != AttnResKind::kNone;
  v.table(model + "embed_tokens.weight", weights.embed, ParamRole::kEmbedding);
  for (int64_t i = 0; i < config.layers; ++i) {
    LayerWeights& layer = weights.layers[i];
    const std::string at = model + "layers." + std::to_string(i) + ".";
    v.norm(at + "input_layernorm.weight", layer.input_norm, config.hidden);
    v.norm(at + "post_attention_layernorm.weight", layer.post_norm, config.hidden);
    if (residuals) {
      v.residual(at + "self_attention", layer.attn_res_norm, layer.attn_res_query);
      v.residual(at + "mlp", layer.mlp_res_norm, layer.mlp_res_query);
    }
    if (layer.kda) v.kda(at + "self_attn.", *layer.kda);
    if (layer.mla) v.mla(at + "self_attn.", *layer.mla);
    if (layer.mlp) v.mlp(at + "mlp.", *layer.mlp, config.intermediate);
    if (layer.moe) v.moe(at + "block_sparse_moe.", *layer.moe);
  }
  v.norm(model + "norm.weight", weights.norm, config.hidden);
  if (residuals) v.residual(model + "output_attn", weights.out_res_norm, weights.out_res_query);
  if (!config.tie_embeddings) v.table(config.prefix() + "lm_head.weight", weights.lm_head, ParamRole::kHead);
  if (weights.vision) v.vision(*config.vision, *weights.vision);
}

ModelWeights init_weights(const ModelConfig& config, uint64_t seed, at::Device device, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  ModelWeights weights = weight_structure(config);
  for_each_param(config, weights, [&](const ParamInfo& info, at::Tensor& value) {
    at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(mix64(seed ^ hash_name(info.name)));
    value = initial_value(config, info, generator).to(device, info.keep_fp32 ? at::kFloat : dtype);
  });
  return weights;
}

ModelWeights convert_weights(const ModelConfig& config, ModelWeights& weights, at::Device device,
                             at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  ModelWeights out = weight_structure(config);
  if (!weights.vision) out.vision.reset();
  std::vector<at::Tensor> values;
  for_each_param(config, weights, [&](const ParamInfo& info, at::Tensor& value) {
    values.push_back(value.detach().to(device, info.keep_fp32 ? at::kFloat : dtype, /*non_blocking=*/false,
                                       /*copy=*/true));
  });
  size_t next = 0;
  for_each_param(config, out, [&](const ParamInfo&, at::Tensor& value) { value = values[next++]; });
  return out;
}

void set_requires_grad(const ModelConfig& config, ModelWeights& weights, bool requires_grad) {
  for_each_param(config, weights, [&](const ParamInfo& info, at::Tensor& value) {
    value.requires_grad_(requires_grad && info.role != ParamRole::kRouterBias);
  });
}

}  // namespace godwit
