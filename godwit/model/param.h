// What a parameter is for. The optimiser, sharding and checkpoints choose by meaning, never by shape or by
// name.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace godwit {

enum class ParamRole {
  kMatrix,      // [out, in] linear weight: Muon
  kExperts,     // [E, out, in], one matrix an expert: Muon on each
  kEmbedding,   // [V, D] token or position table: AdamW
  kHead,        // [V, D] output head: AdamW
  kConv,        // [C, W] short convolution, fp32: AdamW
  kNorm,        // [D] norm weight: AdamW
  kDecay,       // A_log [H], dt_bias [H, K], fp32: AdamW without weight decay
  kQuery,       // [D] AttnRes pseudo-query: AdamW
  kRouterBias,  // [E] fp32, no gradient: set by the balance rule only
};

struct ParamInfo {
  std::string name;  // the released checkpoint's name, e.g. "model.layers.3.self_attn.q_b_proj.weight"
  ParamRole role = ParamRole::kMatrix;
  std::vector<int64_t> shape;
  // kMatrix only: rows of one block for per-head Muon (attention q, k, v projections: rows of one head); 0 =
  // whole.
  int64_t head_rows = 0;
  bool weight_decay = true;
  bool keep_fp32 = false;  // stored in fp32 whatever the model's dtype
  // A linear layer that may be held as int8: all but the router, whose choices small errors change, and
  // kv_b_proj, which decoding takes apart by heads.
  bool may_pack = false;
  bool is_matrix = false;  // the value is a Matrix (see as_matrix): those of the decoder, not of the tower
};

using ParamVisitor = std::function<void(const ParamInfo& info, at::Tensor& value)>;

}  // namespace godwit
