// Decode steps on a GPU as recorded graphs: one launch a step instead of some hundreds. One graph for each
// batch of 1, 2, 4, ... sequences, recorded when it is first needed; smaller batches are padded with rows
// of a sequence of their own. Everything a step depends on (ids, slots, pages, lengths) lies in buffers on
// the device, so one graph serves any sequences at any length. Steps that verify drafts have graphs of their
// own, with as many rows for each sequence.
#pragma once

#include <map>
#include <memory>
#include <utility>
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
  struct Options {
    int64_t max_context = 0;      // of a sequence, in tokens
    int64_t least_sequences = 1;  // of a step, with padding
    int64_t most_tokens = 1;      // of a sequence in verify(): its last token and the drafts
  };
  // All must outlive the graphs.
  DecodeGraphs(const ModelConfig& config, const ModelWeights& weights, ModelState& state,
               const Options& options);

  // One token of each of these sequences, for which `state` has room: logits [N, V] fp32 on the device, valid
  // until the next step. Advances the state.
  at::Tensor step(const std::vector<int64_t>& ids, const std::vector<int64_t>& sequences);

  // Up to most_tokens tokens of each of these sequences, for which `state` has room: logits [N * most_tokens,
  // V] fp32, row n * most_tokens + m behind token m of sequence n. The state is not advanced: keep(), once
  // before the next step, does that by the first `taken` tokens of each of those sequences.
  at::Tensor verify(const std::vector<std::vector<int64_t>>& ids, const std::vector<int64_t>& sequences);
  void keep(const std::vector<int64_t>& taken);

  int64_t recorded() const { return static_cast<int64_t>(graphs_.size()); }

 private:
  struct Graph {
    DeviceStep in;                                             // on the device
    at::Tensor host_ids, host_slots, host_rows, host_lengths;  // pinned, copied to `in`
    at::Tensor logits;
    std::unique_ptr<ops::StepGraph> work;
    // Of several tokens a sequence: what the KDA layers were given, and how much of it is brought to the
    // states.
    std::vector<ops::KdaDecodeArgs> kept;
    at::Tensor host_keep, keep;
    std::unique_ptr<ops::StepGraph> keeping;
  };

  Graph& graph_for(int64_t batch, int64_t tokens);
  void update_table(const std::vector<int64_t>& sequences);
  void fill(Graph& graph, const std::vector<std::vector<int64_t>>& ids,
            const std::vector<int64_t>& sequences);

  const ModelConfig& config_;
  const ModelWeights& weights_;
  ModelState& state_;
  Options options_;
  at::Tensor host_table_, table_;                        // [S, M] int32: pages of every sequence
  std::map<std::pair<int64_t, int64_t>, Graph> graphs_;  // by sequences and their tokens
  Graph* verified_ = nullptr;                            // of the last verify()
};

}  // namespace godwit
