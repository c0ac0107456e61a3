#include "godwit/infer/decode_graph.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>

#include "godwit/base/check.h"

namespace godwit {

bool DecodeGraphs::supports(const ModelConfig& config, at::Device device, at::ScalarType dtype) {
  const int64_t rank = config.mla.kv_lora_rank, width = rank + config.mla.rope_dim;
  return device.is_cuda() && dtype == at::kBFloat16 && !config.mla.rotary && config.kda.head_dim == 128 &&
         config.kda.conv_kernel == 4 && config.kda.gate_lower_bound >= -5.0 && rank % 64 == 0 &&
         rank <= 512 && width % 64 == 0 && width <= 576;
}

DecodeGraphs::DecodeGraphs(const ModelConfig& config, const ModelWeights& weights, ModelState& state,
                           int64_t max_context, int64_t least_rows)
    : config_(config), weights_(weights), state_(state), least_rows_(least_rows) {
  const int64_t padding = state.sequences() - 1, pages = (max_context + kLatentPage - 1) / kLatentPage;
  check(padding >= 1 && state.reserve(padding, 1), "decode graphs: no page for padding rows");
  host_table_ = at::zeros({state.sequences(), pages}, at::TensorOptions(at::kInt).pinned_memory(true));
  table_ = host_table_.to(weights.embed.device());
}

// Copies the entries that are not what they were.
void DecodeGraphs::update_table(const std::vector<int64_t>& sequences) {
  for (const int64_t n : sequences) {
    const PageList& pages = state_.sequence(n).pages;
    auto* row = host_table_.data_ptr<int32_t>() + n * host_table_.size(1);
    int64_t first = -1, last = -1;
    for (int64_t i = 0; i < pages.size(); ++i) {
      if (row[i] == pages[i]) continue;
      row[i] = pages[i];
      first = first < 0 ? i : first;
      last = i;
    }
    if (first < 0) continue;
    table_[n]
        .slice(0, first, last + 1)
        .copy_(host_table_[n].slice(0, first, last + 1), /*non_blocking=*/true);
  }
}

DecodeGraphs::Graph& DecodeGraphs::graph_for(int64_t batch) {
  const auto rows = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max(batch, least_rows_))));
  Graph& g = graphs_[rows];
  if (g.in.ids.defined()) return g;
  const int64_t padding = state_.sequence(state_.sequences() - 1).pages[0] * kLatentPage;
  const auto pinned = [&](at::ScalarType type, int64_t value) {
    return at::full({rows}, value, at::TensorOptions(type).pinned_memory(true));
  };
  g.host_ids = pinned(at::kLong, 0);
  g.host_slots = pinned(at::kInt, -1);
  g.host_rows = pinned(at::kLong, padding);
  g.host_lengths = pinned(at::kLong, 0);
  const at::Device device = table_.device();
  g.in = {.ids = g.host_ids.to(device),
          .slots = g.host_slots.to(device),
          .rows = g.host_rows.to(device),
          .tables = table_,
          .lengths = g.host_lengths.to(device)};
  g.logits = at::empty({rows, config_.vocab_size}, at::TensorOptions(at::kFloat).device(device));
  g.work = ops::record_graph(device, [this, &g] {
    g.logits.copy_(
        ops::linear(forward_device_step(config_, weights_, g.in, state_), head_weight(config_, weights_)));
  });
  return g;
}

at::Tensor DecodeGraphs::step(const std::vector<int64_t>& ids, const std::vector<int64_t>& sequences) {
  const auto N = static_cast<int64_t>(ids.size());
  if (!table_.is_cuda()) return {};
  Graph& g = graph_for(N);
  if (!g.work) return {};
  update_table(sequences);
  const int64_t rows = g.host_ids.size(0),
                padding = state_.sequence(state_.sequences() - 1).pages[0] * kLatentPage;
  for (int64_t i = 0; i < rows; ++i) {
    const bool used = i < N;
    const int64_t n = used ? sequences[i] : -1, at = used ? state_.length(n) : 0;
    g.host_ids.data_ptr<int64_t>()[i] = used ? ids[i] : 0;
    g.host_slots.data_ptr<int32_t>()[i] = static_cast<int32_t>(n);
    g.host_lengths.data_ptr<int64_t>()[i] = used ? at + 1 : 0;
    g.host_rows.data_ptr<int64_t>()[i] =
        used ? state_.sequence(n).pages[at / kLatentPage] * kLatentPage + at % kLatentPage : padding;
  }
  g.in.ids.copy_(g.host_ids, /*non_blocking=*/true);
  g.in.slots.copy_(g.host_slots, /*non_blocking=*/true);
  g.in.rows.copy_(g.host_rows, /*non_blocking=*/true);
  g.in.lengths.copy_(g.host_lengths, /*non_blocking=*/true);
  g.work->replay();
  for (const int64_t n : sequences) state_.advance(n, 1);
  return g.logits.narrow(0, 0, N);
}

}  // namespace godwit
