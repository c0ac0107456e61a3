// The elementwise passes of Muon around Newton-Schulz on the GPU: raw device pointers and sizes, no torch.
// Pointers are aligned to 16 bytes, `n` is a multiple of 8. Launchers only enqueue on `stream`; they return a
// cudaError_t as int (0 = launched).
#pragma once

#include <cstdint>

struct CUstream_st;

namespace godwit::kernels::cuda {

// m <- g + mu m;  u = g + mu m (Nesterov) or m, with g = grad_scale * grad. The update leaves as bf16, in
// which Newton-Schulz is computed.
struct MuonMomentumParams {
  int64_t n = 0;
  const void* grad = nullptr;  // [n] fp32 or bf16
  bool grad_bf16 = false;
  float* momentum = nullptr;  // [n]
  void* update = nullptr;     // [n] bf16
  float grad_scale = 1, mu = 0;
  bool nesterov = false;
  CUstream_st* stream = nullptr;
};
int muon_momentum(const MuonMomentumParams& p);

// w <- keep w - rate u, and w in bf16 for the model.
struct MuonWeightParams {
  int64_t n = 0;
  const void* update = nullptr;  // [n] bf16
  float* weight = nullptr;       // [n]
  void* copy = nullptr;          // [n] bf16, or null
  float keep = 1, rate = 0;
  CUstream_st* stream = nullptr;
};
int muon_weight(const MuonWeightParams& p);

// Symmetric matrices of which only blocks of `block` rows up to and with the diagonal's block are there: the
// rest becomes their mirror image. side and block are multiples of 64.
struct MirrorParams {
  int64_t n = 0;  // matrices
  int side = 0;
  int block = 0;
  void* x = nullptr;  // [n, side, side] bf16
  CUstream_st* stream = nullptr;
};
int mirror_lower(const MirrorParams& p);

}  // namespace godwit::kernels::cuda
