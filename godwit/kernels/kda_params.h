// Arguments of the Kimi Delta Attention kernels on the GPU: raw device pointers and sizes, no torch. Key and
// value width are 128.
//
// Packed layout: T tokens of N sequences stand one after another. cu_seqlens is a device int64 array [N+1],
// cu[0] = 0, cu[N] = T; empty sequences are allowed. With cu_seqlens = nullptr the N sequences are T / N
// tokens each. bf16 unless said otherwise:
//   q, k, v, z, o [T, H, 128]   after convolution and SiLU; q and k not normalised; z gate logits before
//   dt_bias b [T, H] beta logits        A_log [H] fp32, dt_bias [H, 128] fp32 states [N, H, K, V] fp32
// Every launcher only enqueues work on `stream` and allocates nothing; `workspace` holds at least the bytes
// that the *_workspace_bytes function of the same parameters gives, aligned to 256. They return a cudaError_t
// as int (0 = launched).
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace godwit::kernels::cuda {

struct KdaInputs {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const void* z = nullptr;
  const void* b = nullptr;
  const float* A_log = nullptr;
  const float* dt_bias = nullptr;
  const float* initial_state = nullptr;  // nullptr = zeros
  const int64_t* cu_seqlens = nullptr;
  int64_t T = 0;
  int N = 0;
  int H = 0;
  int64_t max_length = 0;   // an upper bound of the longest sequence (T will do, but may waste launches)
  float gate_bound = -5.f;  // < 0 (and >= -5): g = bound sigmoid(e^A (z + dt)); 0: g = -e^A softplus(z + dt)
  bool b_fp32 = false;      // b is fp32, not bf16
};

struct KdaChunkFwdParams {
  KdaInputs in;
  void* o = nullptr;
  float* final_state = nullptr;  // optional
  // Optional states at chunk boundaries. checkpoint_slot holds, for chunk c (16 tokens) of sequence n at
  // index kda_first_unit(cu[n], n, 16) + c, the row of `checkpoints` [*, H, K, V] fp32 that takes the state
  // after that chunk, or -1.
  const int32_t* checkpoint_slot = nullptr;
  float* checkpoints = nullptr;
  void* workspace = nullptr;
  CUstream_st* stream = nullptr;
};
size_t kda_chunk_fwd_workspace_bytes(const KdaInputs& in);
int kda_chunk_fwd(const KdaChunkFwdParams& p);

struct KdaChunkBwdParams {
  KdaInputs in;
  const void* d_o = nullptr;             // [T, H, 128]
  const float* d_final_state = nullptr;  // optional
  void* dq = nullptr;
  void* dk = nullptr;
  void* dv = nullptr;
  void* dz = nullptr;
  float* db = nullptr;               // [T, H] fp32
  float* dA_log = nullptr;           // [H]
  float* d_dt_bias = nullptr;        // [H, 128]
  float* d_initial_state = nullptr;  // optional
  void* workspace = nullptr;
  CUstream_st* stream = nullptr;
};
size_t kda_chunk_bwd_workspace_bytes(const KdaInputs& in);
int kda_chunk_bwd(const KdaChunkBwdParams& p);

// Decode: the next `tokens` tokens of each of B sequences. With conv_weight and norm_weight it is a whole KDA
// layer (short convolutions of width 4 with their state, gate, L2 norms, recurrence, output RMS norm and
// gate); without conv_weight q, k, v come convolved, without norm_weight y is the recurrence's output. Row i
// * tokens + m is token m of sequence i. slot [B] int32 names the row of conv_state and state that sequence i
// owns; a negative slot neither reads nor writes any state and its output rows are zero. Slots must be
// distinct. keep [B] int32 says after how many of the tokens the states are written back (0: not at all): a
// verifier of drafted tokens reads the state once, and keeps later what was accepted. Safe in CUDA graphs.
struct KdaStepParams {
  const void* x[3] = {};               // q, k, v: token r of [H, 128] at x[i] + r * x_stride
  int64_t x_stride = 0;                // elements between tokens
  const void* z = nullptr;             // [B * tokens, H, 128]
  const void* b = nullptr;             // [B * tokens, H]
  const void* gate = nullptr;          // [B * tokens, H, 128] output gate logits; goes with norm_weight
  const float* conv_weight[3] = {};    // [H, 128, 4] each
  const float* A_log = nullptr;        // [H]
  const float* dt_bias = nullptr;      // [H, 128]
  const float* norm_weight = nullptr;  // [128]
  const int32_t* slot = nullptr;       // nullptr = 0 .. B-1
  const int32_t* keep = nullptr;       // nullptr = all tokens
  void* conv_state[3] = {};            // bf16, slot s of [H, 128, 3] at conv_state[i] + s * conv_stride
  int64_t conv_stride = 0;             // elements between slots
  void* state = nullptr;               // slot s of [H, K, V] at element s * state_stride
  int64_t state_stride = 0;            // elements between slots, a multiple of 4; 0 = dense
  bool state_bf16 = false;             // the state is kept in bf16, not fp32 (computed in fp32 all the same)
  void* y = nullptr;                   // [B * tokens, H, 128]
  int B = 0;
  int H = 0;
  int tokens = 1;
  bool b_fp32 = false;  // b is fp32, not bf16
  float gate_bound = -5.f;
  float norm_eps = 1e-5f;
  CUstream_st* stream = nullptr;
};
int kda_step(const KdaStepParams& p);

// Causal depthwise convolution of width 4 and SiLU over packed sequences: y_t = silu(sum_j weight[c][j]
// x_(t-3+j)). C is a multiple of 8.
struct ShortConvParams {
  const void* x = nullptr;        // [T, C] bf16
  const float* weight = nullptr;  // [C, 4]
  const void* initial_state =
      nullptr;  // [N, C, 3] bf16, the inputs before the sequence, oldest first; nullptr = zeros
  const int64_t* cu_seqlens = nullptr;  // device [N+1], nullptr as in KdaInputs
  int64_t T = 0, C = 0;
  int N = 0;
  void* y = nullptr;                    // forward: [T, C] bf16
  void* final_state = nullptr;          // forward, optional: [N, C, 3] bf16
  const void* dy = nullptr;             // backward: [T, C] bf16
  const void* d_final_state = nullptr;  // backward, optional: [N, C, 3] bf16
  void* dx = nullptr;                   // backward: [T, C] bf16
  float* dweight = nullptr;             // backward: [C, 4]
  void* d_initial_state = nullptr;      // backward, optional: [N, C, 3] bf16
  void* workspace = nullptr;            // backward
  CUstream_st* stream = nullptr;
};
int short_conv_fwd(const ShortConvParams& p);
size_t short_conv_bwd_workspace_bytes(const ShortConvParams& p);
int short_conv_bwd(const ShortConvParams& p);

}  // namespace godwit::kernels::cuda
