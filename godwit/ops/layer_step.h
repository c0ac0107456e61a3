// The sub-layers of a decoder layer for rows that take the step forms (decoding), in fp32 on the CPU: the
// kernels of the ops that a sub-layer is made of, called on raw memory with products of the same input in one
// loop. The bits are those of the ops; what is saved is a dispatch, an allocation and a wake-up of threads
// for each of some thirty small ops a layer. Meant to run inside with_awake_threads.
//
// Legend: T rows, D model width, H heads, K head width, C = H K, S slots. Rows with the same slot are tokens
// of one sequence, one after another, oldest first.
#pragma once

#include <vector>

#include "godwit/ops/matrix.h"

namespace godwit::ops {

// Whether x is of the kind that these functions take: fp32 on the CPU, dense rows, no gradient.
bool takes_layer_step(const Tensor& x);

// rms_norm(attn_res_mix(sources), weight); norm and query undefined: of the only source.
Tensor mix_norm_step(const std::vector<Tensor>& sources, const Tensor& norm, const Tensor& query,
                     const Tensor& weight, double eps);

// A KDA layer's weights and states (see kda_step, short_conv). g_b null: g is the full-rank gate.
struct KdaLayerStep {
  const Matrix *q, *k, *v, *f_a, *f_b, *b, *g, *g_b, *o;
  Tensor q_conv, k_conv, v_conv;  // [C, W]
  Tensor A_log, dt_bias, o_norm;  // [H], [C], [K]
  int64_t heads = 0, head_dim = 0;
  double gate_bound = 0, norm_eps = 0;
  Tensor conv_q, conv_k, conv_v;  // [S, C, W-1]
  Tensor recurrent;               // [S, H, K, K]
  Tensor slots;                   // [T] int64 on the CPU
};
// x [T, D] to [T, D]; advances the states. `inputs`, where given, gets what the states depend on [T, 4C + H].
Tensor kda_layer_step(const KdaLayerStep& layer, const Tensor& x, Tensor* inputs = nullptr);
// Advances the states by rows of inputs that kda_layer_step gave, without the layer's output.
void kda_replay(const KdaLayerStep& layer, const Tensor& inputs);

// Gated latent attention, absorbed (see mla_decode). q_a null: q_b takes x. g null: no gate.
struct MlaLayerStep {
  const Matrix *q_a, *q_b, *kv_a, *kv_b, *g, *o;
  Tensor q_a_norm, kv_a_norm;
  int64_t heads = 0, nope = 0, rope = 0, value = 0, rank = 0;
  double scale = 0, norm_eps = 0;
  int64_t window = 0;
  Tensor pages;           // [pages, page rows, rank + rope]
  Tensor table, lengths;  // [T, M] int32, [T] int64: what each row sees
  Tensor rows;            // [T] int64: where each row's latent goes among the flattened pages
};
Tensor mla_layer_step(const MlaLayerStep& layer, const Tensor& x);

struct MlpLayerStep {
  const Matrix *gate, *up, *down;
  double beta_gate = 0, beta_up = 0;
};
Tensor mlp_layer_step(const MlpLayerStep& layer, const Tensor& x);

// down and up null: no latent. shared.gate null: no shared expert.
struct MoeLayerStep {
  const Matrix *router, *down, *up, *w1, *w3, *w2;
  MlpLayerStep shared;
  Tensor router_bias, norm;  // norm undefined: none
  bool router_sees_latent = false;
  int64_t k = 0, groups = 1, topk_groups = 1;
  bool renormalize = true;
  double scale = 1, beta_gate = 0, beta_up = 0, norm_eps = 0;
};
Tensor moe_layer_step(const MoeLayerStep& layer, const Tensor& x);

}  // namespace godwit::ops
