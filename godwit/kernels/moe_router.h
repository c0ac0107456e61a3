// Router of the expert layer (Kimi K3 technical report eq. 11), per token t:
//   s = sigmoid(logits_t);  chosen = the k largest of s + bias, best first, equal values by index
//   p_i = scale s_i / (sum over the chosen s + 1e-20), without renormalisation scale s_i
//   cutoff = the (k+1)-th largest of s + bias, -inf if k = E
// groups > 1: only experts of the topk_groups best groups can be chosen; a group's score is the sum of its
// two largest s + bias. A score that is not a number ranks as -inf.
#pragma once

#include <cstdint>

namespace godwit::kernels {

struct RouterForm {
  int64_t experts = 0;
  int64_t k = 0;
  bool renormalize = true;  // has no effect for k = 1
  float scale = 1;
  int64_t groups = 1;
  int64_t topk_groups = 1;
};

// Arrays: logits, scores [T, E]; bias [E]; chosen, weights [T, k]; cutoff [T]. scores may be null.
struct RouterForward {
  RouterForm form;
  const float* logits = nullptr;
  const float* bias = nullptr;
  int32_t* chosen = nullptr;
  float* weights = nullptr;
  float* scores = nullptr;
  float* cutoff = nullptr;
};
void moe_router_fwd(int64_t tokens, const RouterForward& args);

// d_logits [T, E], zero but for the chosen. The scores are taken from the logits again.
struct RouterBackward {
  RouterForm form;
  const float* d_weights = nullptr;
  const float* logits = nullptr;
  const int32_t* chosen = nullptr;
  float* d_logits = nullptr;
};
void moe_router_bwd(int64_t tokens, const RouterBackward& args);

}  // namespace godwit::kernels
