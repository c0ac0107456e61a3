#include "godwit/train/held_out.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>

#include "godwit/base/check.h"
#include "godwit/data/eval_reader.h"
#include "godwit/data/packed_batch.h"
#include "godwit/ops/ops.h"

namespace godwit {
namespace {

class PositionSums {
 public:
  // nll [T] on the CPU, pieces by cu_seqlens.
  void add(const data::PackedBatch& batch, const at::Tensor& nll) {
    const float* loss = nll.data_ptr<float>();
    for (size_t n = 0; n + 1 < batch.cu_seqlens.size(); ++n) {
      for (int64_t t = batch.cu_seqlens[n]; t < batch.cu_seqlens[n + 1]; ++t) {
        if (batch.targets[t] == data::kNoTarget) continue;
        const auto bucket =
            static_cast<size_t>(std::bit_width(static_cast<uint64_t>(t - batch.cu_seqlens[n])));
        if (bucket >= sums_.size()) sums_.resize(bucket + 1), counts_.resize(bucket + 1);
        sums_[bucket] += loss[t];
        ++counts_[bucket];
      }
    }
  }
  double total() const { return sum(sums_); }
  int64_t tokens() const { return sum(counts_); }
  std::vector<PositionLoss> buckets() const {
    std::vector<PositionLoss> out;
    for (size_t i = 0; i < sums_.size(); ++i) {
      if (counts_[i] == 0) continue;
      const int64_t begin = i == 0 ? 0 : int64_t{1} << (i - 1);
      out.push_back({.begin = begin,
                     .end = int64_t{1} << i,
                     .loss = sums_[i] / static_cast<double>(counts_[i]),
                     .tokens = counts_[i]});
    }
    return out;
  }

 private:
  template <class Value>
  static Value sum(const std::vector<Value>& values) {
    Value total{};
    for (const Value value : values) total += value;
    return total;
  }
  std::vector<double> sums_;
  std::vector<int64_t> counts_;
};

}  // namespace

DeviceBatch to_device(const data::PackedBatch& batch, at::Device device) {
  return {.packed = {.ids = at::tensor(batch.ids).to(device), .cu_seqlens = at::tensor(batch.cu_seqlens)},
          .targets = at::tensor(batch.targets).to(device)};
}

HeldOutLoss held_out_loss(const ModelConfig& config, const ModelWeights& weights,
                          const std::shared_ptr<const data::TokenDataset>& dataset, int64_t context,
                          int64_t max_tokens, at::Device device,
                          const std::function<void(int64_t, int64_t)>& progress) {
  const at::NoGradGuard no_grad;
  const data::EvalReader reader(dataset, context);
  check(reader.targets() > 0, "{}: no held-out token to measure", dataset->path().string());
  const int64_t all = reader.batches();
  const int64_t wanted =
      max_tokens > 0 ? std::clamp<int64_t>((max_tokens + context - 1) / context, 1, all) : all;
  PositionSums sums;
  for (int64_t i = 0; i < wanted; ++i) {
    const data::PackedBatch batch = reader.batch(i * all / wanted);  // spread over the whole text
    const DeviceBatch on_device = to_device(batch, device);
    const at::Tensor hidden = forward_hidden(config, weights, on_device.packed);
    const at::Tensor ones = at::ones({hidden.size(0)}, hidden.options().dtype(at::kFloat));
    const auto [sum, nll] =
        ops::linear_cross_entropy(hidden, head_weight(config, weights), on_device.targets, ones);
    sums.add(batch, nll.to(at::kCPU, at::kFloat).contiguous());
    if (progress) progress(i + 1, wanted);
  }
  const double tokens = static_cast<double>(sums.tokens());
  const double bytes =
      static_cast<double>(reader.text_bytes()) * tokens / static_cast<double>(reader.targets());
  return {.context = context,
          .tokens = sums.tokens(),
          .nats_per_token = sums.total() / tokens,
          .bits_per_byte = sums.total() / std::numbers::ln2 / bytes,
          .by_position = sums.buckets()};
}

}  // namespace godwit
