#include "godwit/model/evaluate.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <bit>
#include <numeric>

#include "godwit/base/check.h"
#include "godwit/ops/ops.h"

namespace godwit {
namespace {

using at::Tensor;

constexpr int64_t kNoTarget = -100;
constexpr int64_t kLogitsAtOnce = int64_t{1} << 25;  // values

Tensor losses_of(const ModelConfig& config, const ModelWeights& weights, const Tensor& hidden,
                 const Tensor& targets) {
  const Tensor ones = at::ones({hidden.size(0)}, hidden.options().dtype(at::kFloat));
  const auto [sum, nll] =
      ops::linear_cross_entropy(hidden, ops::unpacked(head_weight(config, weights)).to(hidden.scalar_type()),
                                targets.to(hidden.device()), ones);
  return nll.to(at::kCPU, at::kFloat);
}

}  // namespace

void for_each_piece(const ModelConfig& config, const ModelWeights& weights, const PackedBatch& all,
                    int64_t piece, const std::function<void(int64_t begin, const Tensor& hidden)>& visit) {
  const at::NoGradGuard no_grad;
  check(piece > 0, "evaluation: pieces must have a token, got {}", piece);
  const Tensor& ids = all.ids;
  ModelState state(config, {.sequences = 1}, ids.device(), weights.embed.scalar_type());
  for (int64_t begin = 0; begin < ids.size(0); begin += piece) {
    const int64_t n = std::min(piece, ids.size(0) - begin);
    const PackedBatch batch{.ids = ids.narrow(0, begin, n),
                            .cu_seqlens = make_cu_seqlens({n}),
                            .media = media_of(config, all, begin, n)};
    visit(begin, forward_hidden(config, weights, batch, &state));
  }
}

Tensor token_losses(const ModelConfig& config, const ModelWeights& weights, const PackedBatch& batch,
                    const Tensor& targets, int64_t piece) {
  const at::NoGradGuard no_grad;
  check(targets.sizes() == batch.ids.sizes(), "evaluation: {} targets for {} tokens", targets.numel(),
        batch.ids.numel());
  Tensor losses = at::zeros({batch.ids.size(0)}, at::kFloat);
  const int64_t sequences = batch.cu_seqlens.numel() - 1;
  const auto* cu = batch.cu_seqlens.data_ptr<int64_t>();
  for (int64_t first = 0; first < sequences;) {
    int64_t last = first + 1;
    while (last < sequences && cu[last + 1] - cu[first] <= piece) ++last;
    const int64_t begin = cu[first], n = cu[last] - begin;
    const Tensor ids = batch.ids.narrow(0, begin, n);
    const auto score = [&](int64_t at, const Tensor& hidden) {
      const int64_t rows = hidden.size(0);
      losses.narrow(0, begin + at, rows)
          .copy_(losses_of(config, weights, hidden, targets.narrow(0, begin + at, rows)));
    };
    const PackedBatch part{.ids = ids,
                           .cu_seqlens = batch.cu_seqlens.slice(0, first, last + 1) - begin,
                           .media = media_of(config, batch, begin, n)};
    if (n > piece)
      for_each_piece(config, weights, part, piece, score);
    else
      score(0, forward_hidden(config, weights, part));
    first = last;
  }
  return losses;
}

Tensor likeliest_tokens(const ModelConfig& config, const ModelWeights& weights, const Tensor& hidden) {
  const at::NoGradGuard no_grad;
  const Matrix& head = head_weight(config, weights);
  const int64_t rows = std::max<int64_t>(1, kLogitsAtOnce / head.size(0));
  Tensor out = at::empty({hidden.size(0)}, at::kLong);
  for (int64_t begin = 0; begin < hidden.size(0); begin += rows) {
    const int64_t n = std::min(rows, hidden.size(0) - begin);
    const Tensor logits = ops::linear(hidden.narrow(0, begin, n), head).to(at::kFloat);
    out.narrow(0, begin, n).copy_(logits.argmax(1));
  }
  return out;
}

void LossByPosition::add(int64_t tokens_before, double nats) {
  check(tokens_before > 0, "evaluation: a target needs a token before it");
  const auto bucket = static_cast<size_t>(std::bit_width(static_cast<uint64_t>(tokens_before)) - 1);
  if (counts_.size() <= bucket) {
    counts_.resize(bucket + 1, 0);
    sums_.resize(bucket + 1, 0.0);
  }
  ++counts_[bucket];
  sums_[bucket] += nats;
}

void LossByPosition::add(const Tensor& losses, const Tensor& targets, const Tensor& cu_seqlens) {
  const Tensor on_cpu = targets.to(at::kCPU).contiguous(), values = losses.contiguous();
  const auto* cu = cu_seqlens.data_ptr<int64_t>();
  const auto* target = on_cpu.data_ptr<int64_t>();
  const auto* loss = values.data_ptr<float>();
  for (int64_t n = 0; n + 1 < cu_seqlens.numel(); ++n) {
    for (int64_t t = cu[n]; t < cu[n + 1]; ++t) {
      if (target[t] != kNoTarget) add(t - cu[n] + 1, loss[t]);
    }
  }
}

std::vector<LossByPosition::Bucket> LossByPosition::buckets() const {
  std::vector<Bucket> out;
  for (size_t k = 0; k < counts_.size(); ++k) {
    if (counts_[k] == 0) continue;
    out.push_back({.begin = int64_t{1} << k,
                   .end = int64_t{2} << k,
                   .tokens = counts_[k],
                   .nats = sums_[k] / static_cast<double>(counts_[k])});
  }
  return out;
}

int64_t LossByPosition::tokens() const {
  return std::accumulate(counts_.begin(), counts_.end(), int64_t{0});
}

double LossByPosition::total_nats() const {
  return std::accumulate(sums_.begin(), sums_.end(), 0.0);
}

}  // namespace godwit
