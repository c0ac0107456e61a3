// The model's configuration: what a Hugging Face config.json of Kimi K3 or Kimi-Linear says, plus Godwit's
// own options, which stand in one object "godwit" beside the released keys. Keys that are absent take the
// released configuration class's defaults.
#pragma once

#include <cmath>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace godwit {

// Kimi Delta Attention (arXiv:2510.26692).
struct KdaConfig {
  int64_t heads = 0;
  int64_t head_dim = 0;           // key width = value width
  int64_t conv_kernel = 4;        // taps of the short convolution
  bool full_rank_gate = false;    // output gate: one [H*V, D] matrix, or a rank-head_dim pair
  double gate_lower_bound = 0.0;  // < 0: g = bound * sigmoid(...); 0: g = -exp(A) * softplus(...)
};

enum class MlaGate { kNone, kOutput, kLocalGlobal };

// Multi-head latent attention.
struct MlaConfig {
  int64_t heads = 0;
  int64_t q_lora_rank = 0;  // 0: one q_proj, no compression
  int64_t kv_lora_rank = 0;
  int64_t nope_dim = 0;
  int64_t rope_dim = 0;  // rotated only when rotary is set
  int64_t v_dim = 0;
  MlaGate gate =
      MlaGate::kNone;  // kOutput: sigmoid(W_g x) on the output; kLocalGlobal: gate*global + (1-gate)*local
  int64_t local_window = 0;  // kLocalGlobal: keys the local path sees
  bool rotary = false;       // rotate q_pe and k_pe; released models do not
  double rope_theta = 10000.0;
  int64_t window = 0;  // > 0: sliding window of the (global) attention

  int64_t qk_dim() const { return nope_dim + rope_dim; }
  double scale() const { return 1.0 / std::sqrt(static_cast<double>(qk_dim())); }
};

enum class RouterInput { kHidden, kLatent };

// Stable LatentMoE.
struct MoeConfig {
  int64_t experts = 0;  // 0: every layer has a dense MLP
  int64_t experts_per_token = 0;
  int64_t shared_experts = 0;  // one fused MLP of shared_experts * inner
  int64_t inner = 0;           // moe_intermediate_size
  int64_t latent = 0;          // routed_expert_hidden_size; 0: experts at full width
  bool latent_norm = false;
  bool renormalize = true;
  double scale = 1.0;  // routed_scaling_factor
  int64_t groups = 1;
  int64_t topk_groups = 1;
  RouterInput router_input = RouterInput::kHidden;
  int64_t first_dense = 0;  // first_k_dense_replace
  int64_t layer_freq = 1;
};

enum class AttnResKind { kNone, kBlock, kFull };  // kNone: plain residual stream

// How the patches of a video's frames see each other; for a still both are the same.
enum class VisionTime {
  kJoint,       // all patches of an item are one sequence (the released code)
  kFactorised,  // within each frame, then each place through the frames, with the same weights (the report)
};

// MoonViT-V2 and the projector.
struct VisionConfig {
  int64_t patch_size = 14;
  int64_t pos_emb_height = 64;
  int64_t pos_emb_width = 64;
  int64_t pos_emb_time = 4;      // most frames of one item
  bool pos_emb_bicubic = false;  // interpolation of the position grid; else bilinear
  VisionTime time = VisionTime::kJoint;
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t heads = 0;
  int64_t qkv_hidden = 0;
  int64_t merge_height = 2;
  int64_t merge_width = 2;
  double projector_eps = 1e-5;

  int64_t head_dim() const { return qkv_hidden / heads; }
  int64_t merge() const { return merge_height * merge_width; }  // patches of one vector
};

struct ModelConfig {
  std::string model_type = "kimi_k3";  // "kimi_k3" (nested, prefix language_model.) or "kimi_linear"
  std::string dtype = "bfloat16";      // dtype of a checkpoint's matrices
  int64_t vocab_size = 0;
  int64_t hidden = 0;
  int64_t layers = 0;
  int64_t intermediate = 0;  // of the dense MLP
  bool situ = false;         // SiTU-GLU; false: SwiGLU
  double situ_beta = 1.0;
  double situ_linear_beta = 0.0;  // 0: the up branch stays linear
  double rms_norm_eps = 1e-6;
  double initializer_range = 0.02;
  bool tie_embeddings = false;
  int64_t max_position = 0;
  int64_t bos_id = -1, eos_id = -1, pad_id = -1, media_id = -1;
  std::vector<bool> kda_layer;  // [layers]: KDA if true, else MLA
  KdaConfig kda;
  MlaConfig mla;
  MoeConfig moe;
  AttnResKind attn_res = AttnResKind::kNone;
  int64_t attn_res_block = 0;  // decoder layers a block, kBlock only
  std::optional<VisionConfig> vision;

  bool is_moe(int64_t layer) const {
    return moe.experts > 0 && layer >= moe.first_dense && layer % moe.layer_freq == 0;
  }
  // Prefix of the text model's tensor names: "language_model." or "".
  std::string prefix() const { return model_type == "kimi_k3" ? "language_model." : ""; }
  // glu() arguments: (0, 0) is SwiGLU.
  double glu_gate_beta() const { return situ ? situ_beta : 0.0; }
  double glu_up_beta() const { return situ ? situ_linear_beta : 0.0; }
};

// The eps of MLA's two inner norms: the released code's class default, whatever rms_norm_eps says.
inline constexpr double kMlaNormEps = 1e-6;

// Parses and validates; `where` names the source in errors. Throws Error naming the key, what was expected
// and what was found.
ModelConfig parse_model_config(const nlohmann::json& json, const std::string& where);
nlohmann::json to_json(const ModelConfig& config);

// MODEL of the command line: a directory with config.json, a config.json, or a preset's name.
ModelConfig load_model_config(const std::string& model);
// The preset's config.json text as shipped in configs/models; Error lists the names if there is none.
nlohmann::json preset_json(const std::string& name);
std::vector<std::string> preset_names();
// The raw JSON of MODEL.
nlohmann::json load_model_json(const std::string& model);

// Checks sizes and options against each other; called by parse_model_config.
void validate(const ModelConfig& config, const std::string& where);

}  // namespace godwit
