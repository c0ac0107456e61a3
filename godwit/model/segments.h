// One long sequence, forward and backward, a segment at a time: memory for the graph of one segment and for
// what the sequence carries, however long it is.
//
// forward() runs without a graph and keeps, at each boundary, the KDA states, and of every token the MLA rows
// (normalised latent | k_pe). backward() takes the segments in reverse order: each is computed again with a
// graph from what was kept, and besides the loss of its own tokens it gets the gradients that later segments
// sent to its last states and to its rows. The gradient is the whole sequence's, credit crosses every
// boundary: nothing is truncated.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "godwit/model/forward.h"

namespace godwit {

class SegmentedSequence {
 public:
  // ids [T] int64 on the model's device. `segment`: tokens of one. `media`: what PackedBatch::media is for
  // the whole sequence. Config and weights must outlive it.
  SegmentedSequence(const ModelConfig& config, const ModelWeights& weights, at::Tensor ids, int64_t segment,
                    const at::Tensor& media = {});

  // Calls visit(begin, hidden [n, D]) for each segment in order, hidden as of forward_hidden.
  using Visit = std::function<void(int64_t begin, const at::Tensor& hidden)>;
  void forward(const Visit& visit);

  // After forward(). `loss` gets the same hidden states with a graph and returns a scalar, or undefined where
  // the segment's tokens have no loss of their own. Gradients are added to those of the weights.
  using Loss = std::function<at::Tensor(int64_t begin, const at::Tensor& hidden)>;
  void backward(const Loss& loss, const ForwardOptions& options = {});

  // After backward(): the gradient of `media`, for the tower that made it; undefined where nothing has one.
  at::Tensor media_grad() const { return media_.defined() ? media_.grad() : at::Tensor(); }

  int64_t kept_bytes() const;  // of states and rows

 private:
  struct Boundary {
    std::vector<KdaState> kda;  // by layer
  };
  std::vector<LayerState> before(int64_t segment) const;
  int64_t begin_of(int64_t segment) const { return segment * segment_; }
  int64_t length_of(int64_t segment) const;
  PackedBatch batch_of(int64_t segment) const;

  const ModelConfig& config_;
  const ModelWeights& weights_;
  at::Tensor ids_, media_;
  int64_t segment_, count_;
  std::vector<Boundary> boundaries_;  // before each segment
  std::vector<at::Tensor> rows_;      // [T, R + P] by layer; undefined for KDA layers
};

}  // namespace godwit
