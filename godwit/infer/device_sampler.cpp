#include "godwit/infer/device_sampler.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "godwit/infer/sampler.h"

namespace godwit {
namespace {

using at::Tensor;

constexpr int64_t kBlock = 512;  // weights whose sum is looked at first

Tensor on_device(const std::vector<double>& values, const Tensor& like) {
  return at::tensor(values, at::kDouble).to(like.device());
}

// The first place of each row at which the running sum of `weights` [n, V] exceeds target [n]; a place
// without weight is never one. First among sums of blocks, then inside the block.
Tensor place_of(const Tensor& weights, const Tensor& target) {
  const int64_t n = weights.size(0), blocks = (weights.size(1) + kBlock - 1) / kBlock;
  const Tensor padded =
      at::constant_pad_nd(weights, {0, blocks * kBlock - weights.size(1)}).view({n, blocks, kBlock});
  const Tensor until = padded.sum(2).cumsum(1);  // [n, blocks]
  const Tensor block = until.le(target.unsqueeze(1)).sum(1, /*keepdim=*/true).clamp_max(blocks - 1);
  const Tensor before = at::where(block.gt(0), until.gather(1, (block - 1).clamp_min(0)), 0.0);  // [n, 1]
  const Tensor inside = padded.gather(1, block.unsqueeze(2).expand({n, 1, kBlock})).squeeze(1);
  const Tensor sums = inside.cumsum(1) + before;
  const Tensor places = at::arange(kBlock, block.options());
  const Tensor first =
      at::where(sums.gt(target.unsqueeze(1)).logical_and(inside.gt(0)), places, kBlock).amin(1);
  return at::where(first.lt(kBlock), block.squeeze(1) * kBlock + first, -1);
}

}  // namespace

bool draws_on_device(const SamplingParams& p) {
  return p.top_k == 0 && p.top_p >= 1.0 && p.min_p <= 0.0 && p.logit_bias.empty() &&
         p.presence_penalty == 0 && p.frequency_penalty == 0 && p.repetition_penalty == 1.0 &&
         !p.policy_logprob;
}

std::vector<DeviceOutcome> draw_on_device(const Tensor& logits, const std::vector<DeviceDraw>& draws) {
  std::vector<int64_t> rows;
  std::vector<double> warmth, chance;
  std::vector<Tensor> masks;
  bool any_sampled = false;
  for (const DeviceDraw& d : draws) {
    rows.push_back(d.row);
    const bool greedy = d.params->temperature <= 0.0;
    any_sampled = any_sampled || !greedy;
    warmth.push_back(greedy ? 1.0 : d.params->temperature);
    chance.push_back(greedy ? -1.0 : draw_chance(*d.params, d.position));
    masks.push_back(d.forbidden);
  }
  const Tensor raw = logits.index_select(0, at::tensor(rows, at::kLong).to(logits.device()));
  const Tensor x = raw.to(at::kDouble);
  const Tensor allowed = x.masked_fill(at::stack(masks), -std::numeric_limits<double>::infinity());
  const auto [peak, best] = allowed.max(1);
  Tensor id = best;
  if (any_sampled) {
    const Tensor share = on_device(chance, raw), by = on_device(warmth, raw).unsqueeze(1);
    const Tensor weights = ((allowed - peak.unsqueeze(1)) / by).exp();
    const Tensor place = place_of(weights, share * weights.sum(1));
    id = at::where(share.lt(0).logical_or(place.lt(0)), best, place);
  }
  const Tensor logprob = x.gather(1, id.unsqueeze(1)).squeeze(1) - x.logsumexp(1);
  const Tensor out =
      at::stack({id.to(at::kDouble), logprob, peak, x.isnan().any(1).to(at::kDouble)}).to(at::kCPU);
  std::vector<DeviceOutcome> outcomes;
  const auto* values = out.const_data_ptr<double>();
  const auto n = static_cast<int64_t>(draws.size());
  for (int64_t i = 0; i < n; ++i) {
    DeviceOutcome o;
    if (values[3 * n + i] != 0)
      o.error = fmt::format("sample: a logit at position {} is NaN", draws[i].position);
    else if (!std::isfinite(values[2 * n + i]))
      o.error = fmt::format("sample: no token can be drawn at position {}", draws[i].position);
    else
      o.sampled = {.id = static_cast<int64_t>(values[i]), .logprob = values[n + i]};
    outcomes.push_back(std::move(o));
  }
  return outcomes;
}

}  // namespace godwit
