// The weights: plain structs of tensors, and the one visitor that names them. Optimiser, checkpoints,
// sharding and the planner all go through for_each_param; a tensor that is not visited does not exist. Linear
// weights are [out, in]; no linear layer has a bias.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "godwit/model/config.h"
#include "godwit/model/param.h"
#include "godwit/ops/matrix.h"

namespace godwit {

using ops::Matrix;

struct KdaWeights {
  Matrix q_proj, k_proj, v_proj;      // [H*K, D]
  at::Tensor q_conv, k_conv, v_conv;  // [H*K, W] fp32 (stored as [H*K, 1, W])
  Matrix f_a, f_b;                    // decay gate [K, D], [H*K, K]
  Matrix b_proj;                      // [H, D]
  at::Tensor A_log, dt_bias;          // [H], [H*K] fp32
  Matrix g_proj;                      // output gate [H*K, D] (full rank), or
  Matrix g_a, g_b;                    // [K, D], [H*K, K]
  at::Tensor o_norm;                  // [K] fp32, shared by the heads
  Matrix o_proj;                      // [D, H*K]
};

struct MlaWeights {
  Matrix q_proj;         // [H*(nope+rope), D] without compression, or
  Matrix q_a, q_b;       // [q_rank, D], [H*(nope+rope), q_rank]
  at::Tensor q_a_norm;   // [q_rank]
  Matrix kv_a, kv_b;     // [kv_rank+rope, D], [H*(nope+v), kv_rank]
  at::Tensor kv_a_norm;  // [kv_rank]
  Matrix g_proj;         // [H*v, D] where the config has a gate
  Matrix o_proj;         // [D, H*v]
};

struct MlpWeights {
  Matrix gate, up, down;  // [I, D], [I, D], [D, I]
};

struct MoeWeights {
  Matrix router;           // [E, D] (or [E, latent] where the router reads the latent)
  at::Tensor router_bias;  // [E] fp32, set by the balance rule
  Matrix down, up;         // latent projections [L, D], [D, L]; undefined without a latent
  at::Tensor norm;         // [L]
  Matrix w1, w3, w2;       // [E, I, L], [E, I, L], [E, L, I]
  std::optional<MlpWeights> shared;
};

struct LayerWeights {
  at::Tensor input_norm, post_norm;  // [D]
  at::Tensor attn_res_norm, attn_res_query, mlp_res_norm,
      mlp_res_query;  // [D], with attention residuals only
  std::optional<KdaWeights> kda;
  std::optional<MlaWeights> mla;
  std::optional<MlpWeights> mlp;
  std::optional<MoeWeights> moe;
};

// MoonViT-V2 and its projector.
struct VisionBlockWeights {
  at::Tensor norm0, norm1;  // [W]
  at::Tensor wqkv, wo;      // [3 * qkv, W], [W, qkv]
  at::Tensor fc0, fc1;      // [inner, W], [W, inner]
};

struct VisionWeights {
  at::Tensor patch_proj;  // [W, 3 p p] (stored as [W, 3, p, p])
  at::Tensor pos_emb;     // [rows, columns, W]
  std::vector<VisionBlockWeights> blocks;
  at::Tensor final_norm;    // [W]
  at::Tensor proj0, proj2;  // [m W, m W], [D, m W], m = patches of one vector
  at::Tensor post_norm;     // [D]
};

struct ModelWeights {
  Matrix embed;  // [V, D]
  std::vector<LayerWeights> layers;
  at::Tensor norm;                         // [D]
  at::Tensor out_res_norm, out_res_query;  // [D]
  Matrix lm_head;                          // [V, D]; undefined when tied
  std::optional<VisionWeights> vision;  // where the configuration has a tower and the files have its weights
};

// Visits every parameter in file order, the vision tower's last, with its name, role and shape. The tensors
// may be undefined (the planner's case). `value` of a parameter with info.is_matrix is a Matrix (see
// as_matrix). Names are the released ones, except that the experts of a layer are one tensor:
// "….experts.w1.weight" [E, I, L].
void for_each_param(const ModelConfig& config, ModelWeights& weights, const ParamVisitor& visit);

// Structs with undefined tensors, shaped by the configuration (which optionals exist).
ModelWeights weight_structure(const ModelConfig& config);

// Allocates and initialises on `device` in `dtype` (parameters marked keep_fp32 in fp32). Each parameter has
// its own random stream of (seed, name), so a change elsewhere does not change it. Matrices and tables N(0,
// initializer_range); norms 1, but the projector's last one initializer_range, so that a picture's vectors
// begin at the size of a token's; AttnRes queries 0 (arXiv:2603.15031); A_log 0 for the bounded gate, log
// U(1, 16) for softplus; dt_bias inverse softplus of dt log-uniform in [1e-3, 1e-1].
ModelWeights init_weights(const ModelConfig& config, uint64_t seed, at::Device device, at::ScalarType dtype);

// Deep copy in another dtype or on another device.
ModelWeights convert_weights(const ModelConfig& config, ModelWeights& weights, at::Device device,
                             at::ScalarType dtype);

// Sets requires_grad on everything except the router biases.
void set_requires_grad(const ModelConfig& config, ModelWeights& weights, bool requires_grad);

}  // namespace godwit
