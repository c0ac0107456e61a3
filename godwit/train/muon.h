// Muon's step on many small fp32 matrices on the CPU in one pass: momentum, Newton-Schulz and weight update
// of a few matrices at a time, while they are in the second-level cache. Whole-tensor operations would read
// and write the memory of all experts eight times. Everything else goes through ATen, in optimizer.cpp.
#pragma once

#include <cstdint>
#include <vector>

namespace godwit {

struct MuonBlock {  // one matrix, contiguous
  float* weight = nullptr;
  float* momentum = nullptr;
  const float* grad = nullptr;
  float keep = 1;  // 1 - lr * weight_decay
  float rate = 0;  // lr * scale
};

struct MuonBlocks {
  std::vector<MuonBlock> blocks;
  int64_t rows = 0, cols = 0;
  float grad_scale = 1, momentum = 0;
  bool nesterov = true;
  int64_t ns_steps = 5;
};

// Whether blocks of this shape are small enough.
bool muon_fits_cache(int64_t rows, int64_t cols);

// m <- grad_scale g + mu m;  u = grad_scale g + mu m (Nesterov) or m;  w <- keep w - rate NewtonSchulz(u).
// A block's result depends neither on its neighbours nor on the number of threads.
void muon_step_cpu(const MuonBlocks& p);

}  // namespace godwit
