#include "godwit/train/muon.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "godwit/base/parallel.h"
#include "godwit/ops/ops.h"

namespace godwit {
namespace {

constexpr int64_t kCacheElements = int64_t{1}
                                   << 16;  // 256 KiB of updates, beside their weights, momenta, gradients

void momentum_update(const MuonBlocks& p, const MuonBlock& block, float* __restrict update, int64_t n) {
  float* __restrict m = block.momentum;
  const float* __restrict g = block.grad;
  const float scale = p.grad_scale, mu = p.momentum;
  if (p.nesterov) {
    for (int64_t i = 0; i < n; ++i) {
      const float grad = scale * g[i];
      m[i] = grad + mu * m[i];
      update[i] = grad + mu * m[i];
    }
  } else {
    for (int64_t i = 0; i < n; ++i) update[i] = m[i] = scale * g[i] + mu * m[i];
  }
}

void weight_update(const MuonBlock& block, const float* __restrict update, int64_t n) {
  float* __restrict w = block.weight;
  for (int64_t i = 0; i < n; ++i) w[i] = block.keep * w[i] - block.rate * update[i];
}

}  // namespace

bool muon_fits_cache(int64_t rows, int64_t cols) {
  // Beyond 128 the Newton-Schulz op itself turns to batched GEMMs with threads of their own.
  return std::min(rows, cols) <= 128 && rows * cols <= kCacheElements;
}

void muon_step_cpu(const MuonBlocks& p) {
  const int64_t n = p.rows * p.cols;
  const int64_t chunk = std::max<int64_t>(1, kCacheElements / 4 / n);
  const auto count = static_cast<int64_t>(p.blocks.size());
  parallel_for(0, count, /*grain=*/1, [&](int64_t begin, int64_t end) {
    std::vector<float> buffer(std::min(chunk, end - begin) * n);
    for (int64_t first = begin; first < end; first += chunk) {
      const int64_t blocks = std::min(chunk, end - first);
      for (int64_t i = 0; i < blocks; ++i) momentum_update(p, p.blocks[first + i], buffer.data() + i * n, n);
      at::Tensor batch = at::from_blob(buffer.data(), {blocks, p.rows, p.cols}, at::kFloat);
      ops::newton_schulz_(batch, p.ns_steps);  // runs on this thread: we are inside a parallel_for
      for (int64_t i = 0; i < blocks; ++i) weight_update(p.blocks[first + i], buffer.data() + i * n, n);
    }
  });
}

}  // namespace godwit
