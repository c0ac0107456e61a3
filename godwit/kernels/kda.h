// Launchers of Kimi Delta Attention on raw pointers (docs/kda.md has the algorithm). All arrays are fp32 and
// dense in their last dimension. Legend: T tokens of N packed sequences, H heads, K key width, V value width.
#pragma once

#include <cstdint>

namespace godwit::kernels {

// Tokens between two saved states, and per chunk of the kernels.
inline constexpr int64_t kKdaChunk = 16;
inline constexpr int64_t kKdaSegment = 128;

// What the forms share: row t of head h of q is at q + t * q_stride + h * K.
struct KdaInputs {
  int64_t heads = 0, key = 0, value = 0;
  const float* q = nullptr;  // [T, H, K] before the L2 norm
  const float* k = nullptr;  // [T, H, K] before the L2 norm
  const float* v = nullptr;  // [T, H, V]
  const float* z = nullptr;  // [T, H, K] gate logits before dt_bias
  const float* b = nullptr;  // [T, H] beta logits
  int64_t q_stride = 0, k_stride = 0, v_stride = 0, z_stride = 0, b_stride = 0;  // between tokens
  const float* A_log = nullptr;                                                  // [H]
  const float* dt_bias = nullptr;                                                // [H, K]
  float gate_bound = 0;  // < 0: bounded gate; else softplus
};

// The N packed sequences: sequence n has tokens cu_seqlens[n] .. cu_seqlens[n + 1].
struct KdaSequences {
  int64_t count = 0;
  const int64_t* cu_seqlens = nullptr;   // [N + 1]
  const float* initial_state = nullptr;  // [N, H, K, V], null = zeros
  // For a backward: the states before every segment but a sequence's first, [segment, H, K, V], and where the
  // segments of each sequence start, [N].
  const int64_t* segment_offset = nullptr;
};

// Segments whose entering state is saved for a sequence of `length` tokens.
inline int64_t kda_saved_segments(int64_t length) {
  return length > 0 ? (length - 1) / kKdaSegment : 0;
}

struct KdaForward {
  KdaInputs in;
  KdaSequences seq;
  float* o = nullptr;            // [T, H, V]
  float* final_state = nullptr;  // [N, H, K, V]
  float* states = nullptr;       // saved states, or null
  float* v_new = nullptr;        // [T, H, V] delta-rule values V~, or null; goes with `states`
};
void kda_chunk_forward(const KdaForward& p);

struct KdaBackward {
  KdaInputs in;
  KdaSequences seq;
  const float* states = nullptr;  // from the forward
  const float* v_new = nullptr;
  const float* grad_o = nullptr;            // [T, H, V] or null = zeros
  const float* grad_final_state = nullptr;  // [N, H, K, V] or null = zeros
  float *dq = nullptr, *dk = nullptr, *dv = nullptr, *dz = nullptr, *db = nullptr;  // dense
  float *dA_log = nullptr, *ddt_bias = nullptr;                                     // [H], [H, K]
  float* d_initial_state = nullptr;                                                 // [N, H, K, V] or null
};
void kda_chunk_backward(const KdaBackward& p);

// One token for each of `count` sequences. Sequence n's state is at state + n * state_stride, [H, K, V]; with
// `slots`, at state + slots[n] * state_stride, and a negative slot stands for a state of zeros that is not
// kept.
struct KdaStep {
  KdaInputs in;
  int64_t count = 0;
  float* state = nullptr;
  int64_t state_stride = 0;
  const int64_t* slots = nullptr;  // [N], distinct where not negative
  float* o = nullptr;              // [N, H, V]
};
void kda_step(const KdaStep& p);

}  // namespace godwit::kernels
