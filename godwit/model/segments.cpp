#include "godwit/model/segments.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

#include "godwit/base/check.h"

namespace godwit {

using at::Tensor;

SegmentedSequence::SegmentedSequence(const ModelConfig& config, const ModelWeights& weights, Tensor ids,
                                     int64_t segment, const Tensor& media)
    : config_(config), weights_(weights), ids_(std::move(ids)), segment_(segment) {
  if (media.defined()) media_ = media.detach().requires_grad_(true);
  check(segment > 0 && segment % kLatentPage == 0,
        "segments: {} tokens are not a positive multiple of {}, where states have the same bits however they "
        "came about",
        segment, kLatentPage);
  check(ids_.dim() == 1 && ids_.numel() > 0, "segments: ids must be [T], T > 0");
  count_ = (ids_.size(0) + segment - 1) / segment;
}

int64_t SegmentedSequence::length_of(int64_t segment) const {
  return std::min(segment_, ids_.size(0) - begin_of(segment));
}

PackedBatch SegmentedSequence::batch_of(int64_t segment) const {
  const int64_t begin = begin_of(segment), n = length_of(segment);
  const PackedBatch whole{.ids = ids_, .cu_seqlens = {}, .media = media_};
  return {.ids = ids_.narrow(0, begin, n),
          .cu_seqlens = make_cu_seqlens({n}),
          .media = media_of(config_, whole, begin, n)};
}

// What the segment finds, without history.
std::vector<LayerState> SegmentedSequence::before(int64_t segment) const {
  std::vector<LayerState> out(config_.layers);
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    out[layer].kda = boundaries_[segment].kda[layer];
    if (rows_[layer].defined()) out[layer].pages = rows_[layer].narrow(0, 0, begin_of(segment));
  }
  return out;
}

void SegmentedSequence::forward(const Visit& visit) {
  const at::NoGradGuard no_grad;
  const at::ScalarType dtype = weights_.embed.scalar_type();
  // An empty state of one sequence says what a boundary looks like.
  ModelState empty(config_, {.sequences = 1, .pages = 1}, ids_.device(), dtype);
  boundaries_.assign(1, {});
  rows_.assign(config_.layers, {});
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    LayerState& state = empty.layers()[layer];
    boundaries_[0].kda.push_back(state.kda);
    if (state.pages.defined()) {
      rows_[layer] = at::empty({ids_.size(0), config_.mla.kv_lora_rank + config_.mla.rope_dim},
                               weights_.embed.options().requires_grad(false));
    }
  }
  for (int64_t s = 0; s < count_; ++s) {
    std::vector<LayerState> carried = before(s);
    const Tensor hidden = forward_segment(config_, weights_, batch_of(s), begin_of(s), carried);
    Boundary& next = boundaries_.emplace_back();
    for (int64_t layer = 0; layer < config_.layers; ++layer) {
      next.kda.push_back(carried[layer].kda);
      if (rows_[layer].defined())
        rows_[layer].narrow(0, begin_of(s), length_of(s)).copy_(carried[layer].pages);
    }
    visit(begin_of(s), hidden);
  }
}

void SegmentedSequence::backward(const Loss& loss, const ForwardOptions& options) {
  check(!boundaries_.empty(), "segments: backward before forward");
  const at::AutoGradMode with_graph(true);
  std::vector<std::vector<Tensor>> later(config_.layers);  // gradients of the KDA states after the segment
  std::vector<Tensor> rows_grad(config_.layers);           // [T, R + P], undefined while there is none
  for (int64_t s = count_; s-- > 0;) {
    std::vector<LayerState> carried = before(s);
    std::vector<std::vector<Tensor>> leaves(config_.layers);  // what came from before
    std::vector<Tensor> earlier_rows(config_.layers);
    for (int64_t layer = 0; layer < config_.layers; ++layer) {
      for (Tensor* part : carried[layer].kda.tensors()) {
        if (!part->defined()) continue;
        *part = part->detach().requires_grad_(s > 0);
        leaves[layer].push_back(*part);
      }
      if (!rows_[layer].defined()) continue;
      carried[layer].pages = carried[layer].pages.detach().requires_grad_(s > 0);
      earlier_rows[layer] = carried[layer].pages;
    }
    const Tensor hidden = forward_segment(config_, weights_, batch_of(s), begin_of(s), carried, options);
    std::vector<Tensor> roots, grads;
    const auto add = [&](const Tensor& root, const Tensor& grad) {
      if (!root.requires_grad() || !grad.defined()) return;
      roots.push_back(root);
      grads.push_back(grad);
    };
    const Tensor own = loss(begin_of(s), hidden);
    if (own.defined()) add(own, at::ones_like(own));
    for (int64_t layer = 0; layer < config_.layers; ++layer) {
      size_t k = 0;
      for (const Tensor* part : carried[layer].kda.tensors())
        if (part->defined() && k < later[layer].size()) add(*part, later[layer][k++]);
      if (rows_grad[layer].defined())
        add(carried[layer].pages, rows_grad[layer].narrow(0, begin_of(s), length_of(s)));
    }
    if (roots.empty()) continue;  // nothing later hangs on it
    torch::autograd::backward(roots, grads);
    for (int64_t layer = 0; layer < config_.layers; ++layer) {
      later[layer].clear();
      for (const Tensor& leaf : leaves[layer]) later[layer].push_back(leaf.grad());
      const Tensor& earlier = earlier_rows[layer];
      if (!earlier.defined() || !earlier.grad().defined()) continue;
      if (!rows_grad[layer].defined()) rows_grad[layer] = at::zeros_like(rows_[layer]);
      rows_grad[layer].narrow(0, 0, earlier.size(0)).add_(earlier.grad());
    }
  }
}

int64_t SegmentedSequence::kept_bytes() const {
  int64_t bytes = 0;
  for (const Boundary& b : boundaries_)
    for (const KdaState& kda : b.kda)
      for (const Tensor* part : kda.tensors())
        if (part->defined()) bytes += static_cast<int64_t>(part->nbytes());
  for (const Tensor& rows : rows_)
    if (rows.defined()) bytes += static_cast<int64_t>(rows.nbytes());
  return bytes;
}

}  // namespace godwit
