// Routed experts on a Hopper GPU: raw device pointers and sizes, no torch. The computation and the layout of
// the arrays are those of moe_experts.h, with z, w1, w3, w2 and out in bf16, the inner activation and an
// expert's output rounded to bf16, all sums in fp32. Width and inner width are multiples of 8. Every launcher
// only enqueues work on `stream` and allocates nothing; `workspace` holds at least the bytes that the
// *_workspace_bytes function of the same shape gives, aligned to 256. They return a cudaError_t as int (0 =
// launched). A choice outside [0, experts) traps on the device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "godwit/kernels/moe_experts.h"

struct CUstream_st;

namespace godwit::kernels::cuda {

struct MoeForwardParams {
  MoeShape shape;
  MoeWeights w;  // kBf16, kInt8 or kMxfp4
  const void* z = nullptr;
  const int32_t* experts = nullptr;  // [T, k]
  const float* weights = nullptr;    // [T, k]
  void* out = nullptr;
  void* saved = nullptr;  // bf16 weights, optional: moe_experts_saved_bytes for the backward
  void* workspace = nullptr;
  CUstream_st* stream = nullptr;
};
// Both products of every row in the experts' order, in bf16.
size_t moe_experts_saved_bytes(const MoeShape& shape);
// Whether there are kernels for these sizes: widths that are multiples of 8 (bf16), 16 (int8) or 32 (MXFP4).
bool moe_experts_fwd_takes(const MoeShape& shape, MoeFormat format);
size_t moe_experts_fwd_workspace_bytes(const MoeShape& shape);
int moe_experts_fwd(const MoeForwardParams& p);

// Gradients; those with a null pointer are not computed. d_weights is fp32, the others are bf16.
struct MoeBackwardParams {
  MoeShape shape;
  MoeWeights w;
  const void* z = nullptr;
  const int32_t* experts = nullptr;
  const float* weights = nullptr;
  const void* saved = nullptr;  // of the forward, or null: computed again, to the same bits
  const void* d_out = nullptr;
  void* d_z = nullptr;
  float* d_weights = nullptr;
  void* d_w1 = nullptr;
  void* d_w3 = nullptr;
  void* d_w2 = nullptr;
  void* workspace = nullptr;
  CUstream_st* stream = nullptr;
};
size_t moe_experts_bwd_workspace_bytes(const MoeShape& shape);
int moe_experts_bwd(const MoeBackwardParams& p);

}  // namespace godwit::kernels::cuda
