// The bandwidth-bound parts of a layer on the GPU: raw device pointers and sizes, no torch. Values are bf16
// unless said otherwise, sums and functions fp32, each result rounded once. Pointers are aligned to 16 bytes.
// Launchers only enqueue work on `stream` and allocate nothing; `workspace` holds at least the bytes that the
// *_workspace_bytes function of the same parameters gives, aligned to 256. They return a cudaError_t as int
// (0 = launched).
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace godwit::kernels::cuda {

// A parameter vector, fp32 or bf16.
struct WeightVector {
  const void* data = nullptr;
  bool bf16 = false;
};
struct WeightGradient {
  void* data = nullptr;
  bool bf16 = false;
};

// Attention Residuals mix (kernels/attn_res_mix.h) of `sources` tensors [T, D]. D is a multiple of 8.
constexpr int kMixMaxSources = 9;
constexpr int kMixMaxWidth = 7168;
struct MixParams {
  const void* v[kMixMaxSources] = {};
  int sources = 0;
  int64_t tokens = 0;
  int width = 0;
  WeightVector norm_weight = {}, query = {};  // [D]
  float eps = 0;
  void* out = nullptr;                              // forward: [T, D]
  const void* d_out = nullptr;                      // backward
  void* d_v[kMixMaxSources] = {};                   // backward
  WeightGradient d_norm_weight = {}, d_query = {};  // backward: [D]
  void* workspace = nullptr;                        // backward
  CUstream_st* stream = nullptr;
};
int attn_res_mix_fwd(const MixParams& p);
size_t attn_res_mix_bwd_workspace_bytes(const MixParams& p);
int attn_res_mix_bwd(const MixParams& p);

// Gated linear unit (kernels/glu.h), n values, a multiple of 8.
struct GluParams {
  int64_t n = 0;
  float beta_gate = 0, beta_up = 0;
  const void* g = nullptr;
  const void* u = nullptr;
  void* out = nullptr;          // forward
  const void* d_out = nullptr;  // backward
  void* d_g = nullptr;
  void* d_u = nullptr;
  CUstream_st* stream = nullptr;
};
int glu_fwd(const GluParams& p);
int glu_bwd(const GluParams& p);

// y = x rsqrt(mean x^2 + eps) weight [sigmoid(gate)] over rows [R, D]. D and x_stride are multiples of 8.
constexpr int kNormMaxWidth = 8192;
struct NormParams {
  const void* x = nullptr;
  const void* gate = nullptr;  // optional
  WeightVector weight = {};
  int64_t rows = 0;
  int width = 0;
  int64_t x_stride = 0;  // elements between rows of x; 0 = dense
  float eps = 0;
  void* y = nullptr;         // forward
  const void* dy = nullptr;  // backward
  void* dx = nullptr;
  void* dgate = nullptr;  // goes with gate
  WeightGradient dweight = {};
  void* workspace = nullptr;  // backward
  CUstream_st* stream = nullptr;
};
int rms_norm_fwd(const NormParams& p);
size_t rms_norm_bwd_workspace_bytes(const NormParams& p);
int rms_norm_bwd(const NormParams& p);

// Cross-entropy of rows of logits (kernels/softmax_loss.h): nll [R] fp32 and, if wanted, d_logits [R, V] bf16
// = weight (softmax - one-hot). A target below 0 is ignored. V is a multiple of 8.
struct SoftmaxLossParams {
  const float* logits = nullptr;  // [R, V] fp32
  const int64_t* targets = nullptr;
  const float* weights = nullptr;
  int64_t rows = 0;
  int vocabulary = 0;
  float* nll = nullptr;
  void* d_logits = nullptr;
  CUstream_st* stream = nullptr;
};
int softmax_loss(const SoftmaxLossParams& p);

// out = x *factor, n values (a multiple of 8) of bf16 or fp32 to bf16, rounded once.
struct ScaledParams {
  WeightVector x;
  const float* factor = nullptr;  // on the device
  int64_t n = 0;
  void* out = nullptr;
  CUstream_st* stream = nullptr;
};
int scaled(const ScaledParams& p);

}  // namespace godwit::kernels::cuda
