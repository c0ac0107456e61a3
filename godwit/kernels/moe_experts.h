// Routed experts, dropless, as one grouped computation (Kimi K3 technical report eq. 13):
//   u_t = sum_i p_ti W2_e glu(W1_e z_t, W3_e z_t),  e = experts_ti,  i = 0 .. k - 1
// The expert's output is weighted after W2 and summed over the slots in their order, fp32 throughout.
// T tokens, k slots a token, E experts, L latent width, I inner width. All arrays are contiguous:
// z, out [T, L]; weights [T, k]; w1, w3 [E, I, L]; w2 [E, L, I].
#pragma once

#include <cstdint>

#include "godwit/kernels/glu.h"
#include "godwit/kernels/moe_plan.h"

namespace godwit::kernels {

struct MoeShape {
  int64_t tokens = 0;
  int64_t k = 0;
  int64_t experts = 0;
  int64_t width = 0;
  int64_t inner = 0;
  GluForm form;
};

// How weights are stored. Only kFp32 and kBf16 (as its bits) have a backward. A weight is value * scale in
// fp32:
//   kInt8   a float a row: s1, s3 [E, I], s2 [E, L]
//   kMxfp4  two values a byte and a power of two for 32 values (io/mxfp4.h): w1 [E, I, L / 2], s1 [E, I, L /
//   32]
//           and so on; L and I are multiples of 32
enum class MoeFormat { kFp32, kBf16, kInt8, kMxfp4 };
struct MoeWeights {
  const void* w1 = nullptr;
  const void* w3 = nullptr;
  const void* w2 = nullptr;
  const void* s1 = nullptr;
  const void* s3 = nullptr;
  const void* s2 = nullptr;
  MoeFormat format = MoeFormat::kFp32;
};

// Rows of `saved` and of the padded buffers are this many floats wide.
inline int64_t moe_padded(int64_t width) {
  return (width + 31) / 32 * 32;
}

struct MoeForward {
  MoeShape shape;
  MoeWeights w;
  const float* z = nullptr;
  const float* weights = nullptr;
  float* out = nullptr;
  float* saved = nullptr;  // [T k, 2, moe_padded(I)] in the plan's row order: W1 z and W3 z for the backward,
                           // 64-byte aligned; or null
};
void moe_experts_fwd(const MoeForward& args, const MoePlan& plan);

// Gradients; those with a null pointer are not computed (the three of the weights go together).
struct MoeBackward {
  MoeShape shape;
  MoeWeights w;
  const float* z = nullptr;
  const float* weights = nullptr;
  const float* saved = nullptr;  // of the forward, or null: computed again
  const float* d_out = nullptr;
  float* d_z = nullptr;
  float* d_weights = nullptr;
  float* d_w1 = nullptr;
  float* d_w3 = nullptr;
  float* d_w2 = nullptr;
};
void moe_experts_bwd(const MoeBackward& args, const MoePlan& plan);

}  // namespace godwit::kernels
