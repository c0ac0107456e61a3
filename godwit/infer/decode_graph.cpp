#include "godwit/infer/decode_graph.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>

#include "godwit/base/check.h"

namespace godwit {

bool DecodeGraphs::supports(const ModelConfig& config, at::Device device, at::ScalarType dtype) {
  const int64_t rank = config.mla.kv_lora_rank;
  return device.is_cuda() && dtype == at::kBFloat16 && !config.mla.rotary && config.kda.head_dim == 128 &&
         config.kda.conv_kernel == 4 && config.kda.gate_lower_bound >= -5.0 && (rank == 256 || rank == 512) &&
         config.mla.rope_dim == 64;
}

DecodeGraphs::DecodeGraphs(const ModelConfig& config, const ModelWeights& weights, ModelState& state,
                           const Options& options)
    : config_(config), weights_(weights), state_(state), options_(options) {
  const int64_t padding = state.sequences() - 1,
                pages = (options.max_context + kLatentPage - 1) / kLatentPage;
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

DecodeGraphs::Graph& DecodeGraphs::graph_for(int64_t batch, int64_t tokens) {
  const auto sequences =
      static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max(batch, options_.least_sequences))));
  Graph& g = graphs_[{sequences, tokens}];
  if (g.in.ids.defined()) return g;
  const int64_t rows = sequences * tokens,
                padding = state_.sequence(state_.sequences() - 1).pages[0] * kLatentPage;
  const auto pinned = [&](at::ScalarType type, int64_t count, int64_t value) {
    return at::full({count}, value, at::TensorOptions(type).pinned_memory(true));
  };
  g.host_ids = pinned(at::kLong, rows, 0);
  g.host_slots = pinned(at::kInt, sequences, -1);
  g.host_rows = pinned(at::kLong, rows, padding);
  g.host_lengths = pinned(at::kLong, rows, 0);
  const at::Device device = table_.device();
  g.in = {.ids = g.host_ids.to(device),
          .slots = g.host_slots.to(device),
          .rows = g.host_rows.to(device),
          .tables = table_,
          .lengths = g.host_lengths.to(device),
          .tokens = tokens};
  g.logits = at::empty({rows, config_.vocab_size}, at::TensorOptions(at::kFloat).device(device));
  auto* const kept = tokens > 1 ? &g.kept : nullptr;
  g.work = ops::record_graph(device, [this, &g, kept] {
    g.logits.copy_(ops::linear(forward_device_step(config_, weights_, g.in, state_, kept),
                               head_weight(config_, weights_)));
  });
  if (!kept) return g;
  g.host_keep = pinned(at::kInt, sequences, 0);
  g.keep = g.host_keep.to(device);
  g.keeping = ops::record_graph(device, [&g] { keep_device_step(g.kept, g.keep); });
  return g;
}

// The buffers of a step. Rows without a token write to the padding sequence's page and see nothing.
void DecodeGraphs::fill(Graph& g, const std::vector<std::vector<int64_t>>& ids,
                        const std::vector<int64_t>& sequences) {
  update_table(sequences);
  const int64_t tokens = g.in.tokens,
                padding = state_.sequence(state_.sequences() - 1).pages[0] * kLatentPage;
  for (int64_t i = 0; i < g.host_slots.size(0); ++i) {
    const int64_t n = i < static_cast<int64_t>(ids.size()) ? sequences[i] : -1,
                  given = n < 0 ? 0 : static_cast<int64_t>(ids[i].size());
    g.host_slots.data_ptr<int32_t>()[i] = static_cast<int32_t>(n);
    for (int64_t m = 0; m < tokens; ++m) {
      const bool used = m < given;
      const int64_t row = i * tokens + m, at = used ? state_.length(n) + m : 0;
      g.host_ids.data_ptr<int64_t>()[row] = used ? ids[i][m] : 0;
      g.host_lengths.data_ptr<int64_t>()[row] = used ? at + 1 : 0;
      g.host_rows.data_ptr<int64_t>()[row] =
          used ? state_.sequence(n).pages[at / kLatentPage] * kLatentPage + at % kLatentPage : padding;
    }
  }
  g.in.ids.copy_(g.host_ids, /*non_blocking=*/true);
  g.in.slots.copy_(g.host_slots, /*non_blocking=*/true);
  g.in.rows.copy_(g.host_rows, /*non_blocking=*/true);
  g.in.lengths.copy_(g.host_lengths, /*non_blocking=*/true);
}

at::Tensor DecodeGraphs::step(const std::vector<int64_t>& ids, const std::vector<int64_t>& sequences) {
  const auto N = static_cast<int64_t>(ids.size());
  Graph& g = graph_for(N, /*tokens=*/1);
  check(g.work != nullptr, "decode graphs: the device records none");
  std::vector<std::vector<int64_t>> each;
  for (const int64_t id : ids) each.push_back({id});
  fill(g, each, sequences);
  g.work->replay();
  for (const int64_t n : sequences) state_.advance(n, 1);
  return g.logits.narrow(0, 0, N);
}

at::Tensor DecodeGraphs::verify(const std::vector<std::vector<int64_t>>& ids,
                                const std::vector<int64_t>& sequences) {
  const auto N = static_cast<int64_t>(ids.size());
  check(options_.most_tokens > 1, "decode graphs: made for steps of one token");
  for (const auto& tokens : ids) {
    check(static_cast<int64_t>(tokens.size()) <= options_.most_tokens,
          "decode graphs: made for steps of {} tokens, got {}", options_.most_tokens, tokens.size());
  }
  verified_ = &graph_for(N, options_.most_tokens);
  check(verified_->work && verified_->keeping, "decode graphs: the device records none");
  fill(*verified_, ids, sequences);
  verified_->work->replay();
  return verified_->logits.narrow(0, 0, N * options_.most_tokens);
}

void DecodeGraphs::keep(const std::vector<int64_t>& taken) {
  Graph& g = *verified_;
  for (int64_t i = 0; i < g.host_keep.size(0); ++i) {
    const int64_t n = i < static_cast<int64_t>(taken.size()) ? taken[i] : 0;
    g.host_keep.data_ptr<int32_t>()[i] = static_cast<int32_t>(n);
    if (n > 0) state_.advance(g.host_slots.data_ptr<int32_t>()[i], n);
  }
  g.keep.copy_(g.host_keep, /*non_blocking=*/true);
  g.keeping->replay();
}

}  // namespace godwit
