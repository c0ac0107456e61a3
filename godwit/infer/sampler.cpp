#include "godwit/infer/sampler.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "godwit/base/check.h"
#include "godwit/base/rng.h"

namespace godwit {
namespace {

constexpr uint64_t kSamplerStream = 0x73616d706c6572;  // "sampler"

struct Candidate {
  int64_t id;
  double weight;  // exp((logit - largest) / temperature)
};

// The tokens that may be drawn, most likely first, after top-k, top-p and min-p.
std::vector<Candidate> candidates(const float* logits, const bool* forbidden, int64_t size,
                                  const SamplingParams& params) {
  double largest = -std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < size; ++i) {
    if (!forbidden || !forbidden[i]) largest = std::max(largest, static_cast<double>(logits[i]));
  }
  std::vector<Candidate> all;
  for (int64_t i = 0; i < size; ++i) {
    if (forbidden && forbidden[i]) continue;
    const double weight = std::exp((logits[i] - largest) / params.temperature);
    if (weight > 0 && weight >= params.min_p) all.push_back({i, weight});
  }
  std::sort(all.begin(), all.end(), [](const Candidate& a, const Candidate& b) {
    return a.weight != b.weight ? a.weight > b.weight : a.id < b.id;
  });
  if (params.top_k > 0 && static_cast<int64_t>(all.size()) > params.top_k) all.resize(params.top_k);
  if (params.top_p < 1.0) {
    const double total = std::accumulate(all.begin(), all.end(), 0.0,
                                         [](double sum, const Candidate& c) { return sum + c.weight; });
    double sum = 0.0;
    size_t keep = 0;
    while (keep < all.size() && (keep == 0 || sum < params.top_p * total)) sum += all[keep++].weight;
    all.resize(keep);
  }
  return all;
}

}  // namespace

Sampled sample(const at::Tensor& logits, const SamplingParams& params, int64_t position,
               const at::Tensor& forbidden) {
  check(logits.dim() == 1 && logits.scalar_type() == at::kFloat && logits.device().is_cpu(),
        "sample: logits must be [V] fp32 on the CPU");
  const at::Tensor row = logits.contiguous();
  const int64_t size = row.numel();
  const float* p = row.data_ptr<float>();
  const bool* banned = forbidden.defined() ? forbidden.data_ptr<bool>() : nullptr;
  double largest = -std::numeric_limits<double>::infinity();
  int64_t best = -1;
  for (int64_t i = 0; i < size; ++i) {
    check(!std::isnan(p[i]), "sample: the logit of token {} at position {} is NaN", i, position);
    largest = std::max(largest, static_cast<double>(p[i]));
    if ((!banned || !banned[i]) && (best < 0 || p[i] > p[best])) best = i;
  }
  check(best >= 0 && std::isfinite(largest), "sample: no token can be drawn at position {}", position);
  double normaliser = 0.0;
  for (int64_t i = 0; i < size; ++i) normaliser += std::exp(p[i] - largest);
  const auto result = [&](int64_t id) {
    return Sampled{.id = id, .logprob = p[id] - largest - std::log(normaliser)};
  };
  if (params.temperature <= 0.0) return result(best);

  const std::vector<Candidate> drawn_from = candidates(p, banned, size, params);
  double total = 0.0;
  for (const Candidate& c : drawn_from) total += c.weight;
  double left = random_uniform(params.seed, kSamplerStream, static_cast<uint64_t>(position)) * total;
  for (const Candidate& c : drawn_from) {
    left -= c.weight;
    if (left < 0) return result(c.id);
  }
  return result(drawn_from.back().id);
}

}  // namespace godwit
