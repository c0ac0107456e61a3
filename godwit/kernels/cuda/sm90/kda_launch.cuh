// The kernels' launchers, as the entry points in cuda/*.cu call them.
#pragma once

#include <cuda_runtime.h>

#include "godwit/kernels/kda_params.h"

namespace godwit::kernels::cuda::sm90 {

// Where the state pass reads and writes beside the inputs.
struct KdaStateArgs {
  KdaInputs in;
  const uint8_t* blocks = nullptr;  // operand blocks [chunk slots][H]
  const float* segment_states =
      nullptr;  // [segment units][H][K][V]: the state that enters segment > 0 of a cut sequence
  float* segment_maps = nullptr;  // [segment units][H][K][256]: B in columns 0-127, A in 128-255
  void* o = nullptr;
  float* final_state = nullptr;
  const int32_t* checkpoint_slot = nullptr;
  float* checkpoints = nullptr;
  uint8_t* chunk_states =
      nullptr;        // for the backward: bf16 S^T [V][K] that enters every chunk, swizzled, [chunk slots][H]
  void* u = nullptr;  // for the backward: U [T, H, V] bf16
  int64_t segments = 0;  // kda_segment_units
};

struct KdaBwdArgs {
  KdaInputs in;
  const uint8_t* blocks = nullptr;
  const void* d_o = nullptr;
  const float* d_final_state = nullptr;
  const uint8_t* chunk_states = nullptr;  // recorded S^T and dS'^T, bf16 [chunk slots][H][V][K]
  uint8_t* chunk_gradients = nullptr;
  const void* u = nullptr;  // [T, H, 128]
  void *dq = nullptr, *dk = nullptr, *dv = nullptr, *dz = nullptr;
  float *db = nullptr, *dA_log = nullptr, *d_dt_bias = nullptr, *d_initial_state = nullptr;
  float *dt_part = nullptr, *A_part = nullptr;  // [chunk slots][H][128] and [chunk slots][H]
  float* db_part = nullptr;  // [chunk slots][H][8][16]: dX . U of every token over 16 value columns each
};

cudaError_t launch_bwd_state(const KdaBwdArgs& a, cudaStream_t stream);
cudaError_t launch_bwd_gradients(const KdaBwdArgs& a, cudaStream_t stream);
cudaError_t launch_prepare(const KdaInputs& in, uint8_t* blocks, cudaStream_t stream);
cudaError_t launch_state_output(const KdaStateArgs& a, cudaStream_t stream);
cudaError_t launch_state_record(const KdaStateArgs& a, cudaStream_t stream);
cudaError_t launch_segment_maps(const KdaStateArgs& a, cudaStream_t stream);
cudaError_t launch_segment_scan(const KdaInputs& in, const float* maps, float* states, int64_t segments,
                                cudaStream_t stream);

}  // namespace godwit::kernels::cuda::sm90
