#include "godwit/model/state.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace godwit {

void LatentCache::append(const at::Tensor& rows_new) {
  const int64_t needed = length + rows_new.size(0);
  if (!rows.defined() || needed > rows.size(0)) {
    const int64_t capacity = std::max<int64_t>({needed, rows.defined() ? 2 * rows.size(0) : 0, 64});
    at::Tensor grown = at::empty({capacity, rows_new.size(1)}, rows_new.options());
    if (length > 0) grown.narrow(0, 0, length).copy_(view());
    rows = grown;
  }
  rows.narrow(0, length, rows_new.size(0)).copy_(rows_new);
  length = needed;
}

int64_t ModelState::bytes() const {
  int64_t total = 0;
  for (const LayerState& layer : layers) {
    for (const at::Tensor& t : {layer.kda.conv_q, layer.kda.conv_k, layer.kda.conv_v, layer.kda.recurrent}) {
      if (t.defined()) total += static_cast<int64_t>(t.nbytes());
    }
    for (const LatentCache& cache : layer.latent) {
      if (cache.rows.defined()) total += static_cast<int64_t>(cache.rows.nbytes());
    }
  }
  return total;
}

ModelState ModelState::clone() const {
  ModelState copy = *this;
  const auto deep = [](at::Tensor& t) {
    if (t.defined()) t = t.clone();
  };
  for (LayerState& layer : copy.layers) {
    for (at::Tensor* t : {&layer.kda.conv_q, &layer.kda.conv_k, &layer.kda.conv_v, &layer.kda.recurrent})
      deep(*t);
    for (LatentCache& cache : layer.latent) deep(cache.rows);
  }
  return copy;
}

ModelState make_state(const ModelConfig& config, int64_t sequences, at::Device device, at::ScalarType dtype) {
  ModelState state;
  state.lengths.assign(sequences, 0);
  state.layers.resize(config.layers);
  const int64_t H = config.kda.heads, K = config.kda.head_dim;
  for (int64_t i = 0; i < config.layers; ++i) {
    LayerState& layer = state.layers[i];
    if (!config.kda_layer[i]) {
      layer.latent.resize(sequences);
      continue;
    }
    const auto options = at::TensorOptions().device(device).dtype(dtype);
    for (at::Tensor* t : {&layer.kda.conv_q, &layer.kda.conv_k, &layer.kda.conv_v}) {
      *t = at::zeros({sequences, H * K, config.kda.conv_kernel - 1}, options);
    }
    layer.kda.recurrent = at::zeros({sequences, H, K, K}, options.dtype(at::kFloat));
  }
  return state;
}

}  // namespace godwit
