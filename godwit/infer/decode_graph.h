// Decode steps on a GPU as recorded graphs: one launch a step instead of some hundreds. One graph for each
// batch of 1, 2, 4, ... sequences, recorded when it is first needed; smaller batches are padded with rows
// of a sequence of their own. Everything a step depends on (ids, slots, pages, lengths) lies in buffers on
// the device, so one graph serves any sequences at any length.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "godwit/model/forward.h"
#include "godwit/ops/step_graph.h"

namespace godwit {

class DecodeGraphs {
 public:
  // Whether a step of this model is made of kernels alone: elsewhere ops fall back to compositions that look
  // at lengths on the host, which cannot be recorded.
  static bool supports(const ModelConfig& config, at::Device device, at::ScalarType dtype);

  // `state` has one sequence more than are served: its last, that of padding rows.
  // Sequences have at most `max_context` tokens, a step at least `least_rows`. All must outlive the graphs.
  DecodeGraphs(const ModelConfig& config, const ModelWeights& weights, ModelState& state, int64_t max_context,
               int64_t least_rows = 1);

  // One token of each of these sequences, for which `state` has room: logits [N, V] fp32 on the device, valid
  // until the next step. Advances the state. Undefined, and nothing done, where the device records no graphs.
  at::Tensor step(const std::vector<int64_t>& ids, const std::vector<int64_t>& sequences);

  int64_t recorded() const { return static_cast<int64_t>(graphs_.size()); }

 private:
  struct Graph {
    DeviceStep in;                                             // on the device
    at::Tensor host_ids, host_slots, host_rows, host_lengths;  // pinned, copied to `in`
    at::Tensor logits;
    std::unique_ptr<ops::StepGraph> work;
  };

  Graph& graph_for(int64_t batch);
  void update_table(const std::vector<int64_t>& sequences);

  const ModelConfig& config_;
  const ModelWeights& weights_;
  ModelState& state_;
  int64_t least_rows_;
  at::Tensor host_table_, table_;  // [S, M] int32: pages of every sequence
  std::map<int64_t, Graph> graphs_;
};

}  // namespace godwit
