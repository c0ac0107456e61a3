// Attention Residuals mix (Kimi K3 technical report eq. 8-10, arXiv 2603.15031), per token, over S sources
// v_s [D]:
//   r_s = (mean v_s^2 + eps)^-1/2,  score_s = r_s sum_c key_c v_sc,  key = norm_weight * query
//   alpha = softmax(score),  out = sum_s alpha_s v_s
// Sources are S pointers to [T, D], fp32.
#pragma once

#include <cstdint>

namespace godwit::kernels {

inline constexpr int64_t kMixTokens = 64;  // tokens whose key gradients are summed together

struct MixForward {
  int64_t sources = 0;
  int64_t width = 0;
  float eps = 0;
  const float* const* v = nullptr;
  const float* key = nullptr;
  float* out = nullptr;
};
void attn_res_mix_fwd(int64_t tokens, const MixForward& args);

// d_v: S pointers to [T, D], or null where not wanted; d_key [D] (sum over tokens, in a fixed order).
struct MixBackward {
  int64_t sources = 0;
  int64_t width = 0;
  float eps = 0;
  const float* const* v = nullptr;
  const float* key = nullptr;
  const float* d_out = nullptr;
  float* const* d_v = nullptr;
  float* d_key = nullptr;
};
void attn_res_mix_bwd(int64_t tokens, const MixBackward& args);

}  // namespace godwit::kernels
