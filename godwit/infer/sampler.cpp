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

bool likelier(const Candidate& a, const Candidate& b) {
  return a.weight != b.weight ? a.weight > b.weight : a.id < b.id;
}

// The tokens that may be drawn and pass min-p, by id. `exps`: exp(logits - peak) of all of them;
// the peak is NaN where the logits have changed since.
std::vector<Candidate> candidates(const float* logits, const bool* forbidden, const std::vector<double>& exps,
                                  double peak, const SamplingParams& params) {
  const auto size = static_cast<int64_t>(exps.size());
  double largest = -std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < size; ++i) {
    if (!forbidden || !forbidden[i]) largest = std::max(largest, static_cast<double>(logits[i]));
  }
  const bool ready = peak == largest && params.temperature == 1.0;
  std::vector<Candidate> all;
  all.reserve(size);
  for (int64_t i = 0; i < size; ++i) {
    if (forbidden && forbidden[i]) continue;
    const double weight = ready ? exps[i] : std::exp((logits[i] - largest) / params.temperature);
    if (weight > 0 && weight >= params.min_p) all.push_back({i, weight});
  }
  return all;
}

// The `count` likeliest in front, in order, of which the first `sorted` are there already.
void sort_front(std::vector<Candidate>& all, size_t sorted, size_t count) {
  const auto begin = all.begin() + static_cast<int64_t>(sorted),
             end = all.begin() + static_cast<int64_t>(count);
  if (count < all.size()) std::nth_element(begin, end, all.end(), likelier);
  std::sort(begin, end, likelier);
}

// Cuts to top-k, then to top-p. Only as many are sorted as remain.
void cut(std::vector<Candidate>& all, const SamplingParams& params) {
  if (params.top_k > 0 && static_cast<int64_t>(all.size()) > params.top_k) {
    sort_front(all, 0, params.top_k);
    all.resize(params.top_k);
  }
  if (params.top_p >= 1.0) return;
  double total = 0.0, sum = 0.0;
  for (const Candidate& c : all) total += c.weight;
  size_t keep = 0;
  for (size_t sorted = 0, next = 64; keep < all.size(); next *= 8) {
    next = std::min(next, all.size());
    sort_front(all, sorted, next);
    sorted = next;
    while (keep < sorted && (keep == 0 || sum < params.top_p * total)) sum += all[keep++].weight;
    if (keep < sorted || sum >= params.top_p * total) break;
  }
  all.resize(keep);
}

// `row` with bias and penalties; undefined when there are none.
at::Tensor adjusted(const at::Tensor& row, const SamplingParams& params, const TokenHistory* history) {
  const bool counts = params.presence_penalty != 0 || params.frequency_penalty != 0;
  const bool repeats = params.repetition_penalty != 1.0;
  if (params.logit_bias.empty() && !(history && (counts || repeats))) return {};
  at::Tensor out = row.clone();
  float* p = out.data_ptr<float>();
  const auto repeat = [&](int32_t id) {
    const auto penalty = static_cast<float>(params.repetition_penalty);
    p[id] = p[id] > 0 ? p[id] / penalty : p[id] * penalty;
  };
  if (history) {
    for (const auto& [id, times] : history->drawn) {
      if (repeats) repeat(id);
      p[id] -= static_cast<float>(params.presence_penalty + params.frequency_penalty * times);
    }
    for (const int32_t id : history->prompt) {
      if (repeats && !history->drawn.contains(id)) repeat(id);
    }
  }
  for (const auto& [id, bias] : params.logit_bias) {
    check(id >= 0 && id < row.numel(), "logit_bias: id {} lies outside the vocabulary of {}", id,
          row.numel());
    p[id] += static_cast<float>(bias);
  }
  return out;
}

double log_normaliser(const float* p, int64_t size, double largest) {
  double sum = 0.0;
  for (int64_t i = 0; i < size; ++i) sum += std::exp(p[i] - largest);
  return largest + std::log(sum);
}

}  // namespace

double draw_chance(const SamplingParams& params, int64_t position) {
  return random_uniform(params.seed, kSamplerStream, static_cast<uint64_t>(position));
}

double policy_logprob(const at::Tensor& logits, const at::Tensor& forbidden, double temperature, int64_t id) {
  if (temperature <= 0.0) return 0.0;  // the one token that can come
  const at::Tensor row = logits.contiguous();
  const float* p = row.data_ptr<float>();
  const bool* banned = forbidden.defined() ? forbidden.data_ptr<bool>() : nullptr;
  const int64_t size = row.numel();
  double largest = -std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < size; ++i)
    if (!banned || !banned[i]) largest = std::max(largest, static_cast<double>(p[i]));
  double sum = 0.0;
  for (int64_t i = 0; i < size; ++i)
    if (!banned || !banned[i]) sum += std::exp((p[i] - largest) / temperature);
  return (p[id] - largest) / temperature - std::log(sum);
}

Sampled forced_token(const at::Tensor& logits, const SamplingParams& params, const at::Tensor& forbidden,
                     int64_t id) {
  const at::Tensor row = logits.contiguous();
  const float* p = row.data_ptr<float>();
  check(id >= 0 && id < row.numel() && !(forbidden.defined() && forbidden.data_ptr<bool>()[id]),
        "a forced token {} may not be drawn", id);
  const double largest = *std::max_element(p, p + row.numel());
  return {
      .id = id,
      .logprob = p[id] - log_normaliser(p, row.numel(), largest),
      .policy_logprob = params.policy_logprob ? policy_logprob(row, forbidden, params.temperature, id) : 0.0};
}

Sampled sample(const at::Tensor& logits, const SamplingParams& params, int64_t position,
               const at::Tensor& forbidden, const TokenHistory* history) {
  check(logits.dim() == 1 && logits.scalar_type() == at::kFloat && logits.device().is_cpu(),
        "sample: logits must be [V] fp32 on the CPU");
  const at::Tensor row = logits.contiguous();
  const int64_t size = row.numel();
  const float* raw = row.data_ptr<float>();
  double largest = -std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < size; ++i) {
    check(!std::isnan(raw[i]), "sample: the logit of token {} at position {} is NaN", i, position);
    largest = std::max(largest, static_cast<double>(raw[i]));
  }
  const at::Tensor changed = adjusted(row, params, history);
  const float* p = changed.defined() ? changed.data_ptr<float>() : raw;
  const bool* banned = forbidden.defined() ? forbidden.data_ptr<bool>() : nullptr;
  int64_t best = -1;
  for (int64_t i = 0; i < size; ++i) {
    if ((!banned || !banned[i]) && (best < 0 || p[i] > p[best])) best = i;
  }
  check(best >= 0 && std::isfinite(largest), "sample: no token can be drawn at position {}", position);
  std::vector<double> exps(size);
  double sum = 0.0;
  for (int64_t i = 0; i < size; ++i) sum += exps[i] = std::exp(raw[i] - largest);
  const double normaliser = largest + std::log(sum);
  const auto result = [&](int64_t id) {
    return Sampled{.id = id,
                   .logprob = raw[id] - normaliser,
                   .policy_logprob =
                       params.policy_logprob ? policy_logprob(row, forbidden, params.temperature, id) : 0.0};
  };
  if (params.temperature <= 0.0) return result(best);

  const double peak = changed.defined() ? std::numeric_limits<double>::quiet_NaN() : largest;
  std::vector<Candidate> drawn_from = candidates(p, banned, exps, peak, params);
  cut(drawn_from, params);
  double total = 0.0;
  for (const Candidate& c : drawn_from) total += c.weight;
  double left = draw_chance(params, position) * total;
  for (const Candidate& c : drawn_from) {
    left -= c.weight;
    if (left < 0) return result(c.id);
  }
  return result(drawn_from.back().id);
}

std::vector<std::pair<int32_t, double>> likeliest(const at::Tensor& logits, int64_t count) {
  const at::Tensor row = logits.contiguous();
  const float* p = row.data_ptr<float>();
  const int64_t size = row.numel();
  count = std::min(count, size);
  std::vector<int32_t> order(size);
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + count, order.end(),
                    [&](int32_t a, int32_t b) { return p[a] != p[b] ? p[a] > p[b] : a < b; });
  const double normaliser = size > 0 ? log_normaliser(p, size, p[order[0]]) : 0.0;
  std::vector<std::pair<int32_t, double>> out;
  for (int64_t i = 0; i < count; ++i) out.emplace_back(order[i], p[order[i]] - normaliser);
  return out;
}

}  // namespace godwit
