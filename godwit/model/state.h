// What N sequences carry from one forward call to the next. One logical boundary for both kinds of layer:
// after a call every layer stands at the same token.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "godwit/model/config.h"

namespace godwit {

struct KdaState {
  at::Tensor conv_q, conv_k, conv_v;  // [N, H*K, W-1] the last inputs of the convolutions
  at::Tensor recurrent;               // [N, H, K, V] fp32
};

// Compressed keys and values of one sequence: rows (normalised latent | k_pe) [capacity, kv_rank + rope];
// capacity grows by doubling.
struct LatentCache {
  at::Tensor rows;
  int64_t length = 0;

  void append(const at::Tensor& rows_new);
  at::Tensor view() const { return rows.narrow(0, 0, length); }
};

struct LayerState {
  KdaState kda;
  std::vector<LatentCache> latent;  // [N], MLA layers
};

struct ModelState {
  std::vector<LayerState> layers;
  std::vector<int64_t> lengths;  // [N] tokens seen

  int64_t sequences() const { return static_cast<int64_t>(lengths.size()); }
  // Bytes held by tensors.
  int64_t bytes() const;
  // Deep copy: a snapshot to return to.
  ModelState clone() const;
};

// Empty state for `sequences` sequences. `dtype` is the activations' dtype.
ModelState make_state(const ModelConfig& config, int64_t sequences, at::Device device, at::ScalarType dtype);

}  // namespace godwit
