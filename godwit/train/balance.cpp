#include "godwit/train/balance.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>

#include "godwit/base/check.h"
#include "godwit/ops/moe_routing.h"
#include "godwit/ops/ops.h"

namespace godwit {
namespace {

constexpr int64_t kProbeTokens = 128;  // tokens a layer whose choices are compared for the flip rate

// Share of the k choices of each row of `scores` that differ between two biases.
double flip_rate(const at::Tensor& scores, const at::Tensor& before, const at::Tensor& after, int64_t k) {
  if (!scores.defined() || scores.size(0) == 0) return 0;
  const auto chosen = [&](const at::Tensor& bias) {
    const at::Tensor index = std::get<1>(at::topk(scores + bias, k, 1));
    return at::zeros(scores.sizes(), scores.options().dtype(at::kBool)).scatter_(1, index, true);
  };
  const auto kept = chosen(before).logical_and(chosen(after)).sum().item<int64_t>();
  return 1.0 - static_cast<double>(kept) / static_cast<double>(scores.size(0) * k);
}

}  // namespace

at::Tensor quantile_from_histogram(const at::Tensor& counts, double range_min, double range_max, double q) {
  const int64_t bins = counts.size(1);
  const at::Tensor cumulative = counts.cumsum(1);
  const auto rank = static_cast<int64_t>(std::ceil(q));
  const at::Tensor bin =
      (cumulative < rank).sum(1, /*keepdim=*/true).clamp_max(bins - 1);  // the first that reaches it
  const at::Tensor inside = counts.gather(1, bin);
  const at::Tensor before = cumulative.gather(1, bin) - inside;
  const at::Tensor share = ((q - before.to(at::kDouble)) / inside.to(at::kDouble).clamp_min(1)).clamp(0, 1);
  const double width = (range_max - range_min) / static_cast<double>(bins);
  return (range_min + (bin.to(at::kDouble) + share) * width).squeeze(1);
}

at::Tensor exact_quantile_bias(const at::Tensor& scores, const at::Tensor& bias, int64_t k) {
  at::NoGradGuard no_grad;
  const int64_t tokens = scores.size(0), experts = scores.size(1);
  check(k >= 1 && k < experts && tokens > 0, "exact_quantile_bias: k {} of {} experts, {} tokens", k, experts,
        tokens);
  const at::Tensor s = scores.to(at::kDouble);
  const at::Tensor cutoff = std::get<0>(at::topk(s + bias.to(at::kDouble), k + 1, 1)).select(1, k);
  const at::Tensor required = cutoff.unsqueeze(1) - s;
  const int64_t rank = std::min(tokens, tokens * k / experts + 1);  // exactly q of them are smaller
  const at::Tensor out = std::get<0>(at::kthvalue(required, rank, 0));
  return out - out.mean();
}

LoadStats load_stats(const at::Tensor& load_E) {
  const at::Tensor load = load_E.to(at::kCPU, at::kDouble);
  LoadStats out;
  out.dead_experts = (load == 0).sum().item<int64_t>();
  const double mean = load.mean().item<double>();
  if (!(mean > 0)) return out;
  out.max_vio = load.max().item<double>() / mean - 1;
  const at::Tensor p = load / load.sum();
  const double entropy = -at::xlogy(p, p).sum().item<double>();
  out.entropy = load.numel() > 1 ? entropy / std::log(static_cast<double>(load.numel())) : 1.0;
  return out;
}

at::Tensor balance_loss(const BalanceOptions& options, const at::Tensor& logits, const at::Tensor& experts,
                        const at::Tensor& cu_seqlens, int64_t batch_tokens) {
  const bool aux = options.method == BalanceMethod::kAuxLoss && options.aux_coefficient > 0;
  const bool entropy = options.entropy_regularisation > 0;
  if (!(aux || entropy) || logits.size(0) == 0) return {};
  const int64_t width = logits.size(1), documents = cu_seqlens.size(0) - 1;
  const at::Tensor wide = logits.scalar_type() == at::kDouble ? logits : logits.to(at::kFloat);
  const at::Tensor tokens_N = cu_seqlens.diff();
  const at::Tensor document_T =
      at::repeat_interleave(at::arange(documents, at::kLong), tokens_N).to(logits.device());
  const at::Tensor p_TE = at::softmax(at::log_sigmoid(wide), 1);
  const at::Tensor tokens = tokens_N.to(wide.options());
  const at::Tensor weight_N = tokens / static_cast<double>(batch_tokens);
  // An empty document has weight 0; 1 keeps its mean finite.
  const at::Tensor divisor = tokens.clamp_min(1).unsqueeze(1);
  const at::Tensor mean_NE =
      at::zeros({documents, width}, p_TE.options()).index_add(0, document_T, p_TE) / divisor;
  at::Tensor loss = at::zeros({}, p_TE.options());
  if (aux) {
    const auto k = static_cast<double>(experts.size(1));
    const at::Tensor hits_TE =
        at::zeros(p_TE.sizes(), p_TE.options()).scatter_(1, experts.to(at::kLong), 1.0);
    const at::Tensor load_NE =
        at::zeros({documents, width}, p_TE.options()).index_add(0, document_T, hits_TE);
    const at::Tensor share_NE = load_NE * (static_cast<double>(width) / k) / divisor;
    loss = loss + options.aux_coefficient * ((share_NE * mean_NE).sum(1) * weight_N).sum();
  }
  if (entropy) {
    const at::Tensor entropy_N = -at::xlogy(mean_NE, mean_NE.clamp_min(1e-30)).sum(1);
    const double most = std::log(static_cast<double>(width));
    loss = loss + options.entropy_regularisation * ((most - entropy_N) * weight_N).sum();
  }
  return loss;
}

// ---- Balancer
// -----------------------------------------------------------------------------------------------

double BalanceReport::max_vio() const {
  double out = 0;
  for (const LayerBalance& layer : layers) out = std::max(out, layer.batch.max_vio);
  return out;
}

int64_t BalanceReport::dead_experts() const {
  int64_t out = 0;
  for (const LayerBalance& layer : layers) out = std::max(out, layer.batch.dead_experts);
  return out;
}

void Balancer::add_layer(const std::string& name, const at::Tensor& bias, int64_t k) {
  check(bias.dim() == 1 && bias.scalar_type() == at::kFloat, "balance: {}: the bias is [E] in float32", name);
  check(k >= 1 && k <= bias.size(0), "balance: {}: {} of {} experts a token", name, k, bias.size(0));
  const int64_t experts = bias.size(0);
  const auto on_device = bias.options().dtype(at::kLong);
  Layer layer;
  layer.name = name;
  layer.bias = bias;
  layer.k = k;
  if (options_.method == BalanceMethod::kQuantile)
    layer.counts = at::zeros({experts, kQuantileBins}, on_device);
  layer.load = at::zeros({experts}, on_device);
  layer.recent = at::zeros({experts}, at::kDouble);
  layer.idle = at::zeros({experts}, at::kLong);
  layer.alarm = at::zeros({3}, at::kLong);
  layers_.push_back(std::move(layer));
}

void Balancer::begin_step() {
  at::NoGradGuard no_grad;
  for (Layer& layer : layers_) {
    layer.load.zero_();
    layer.probe.reset();
    if (!layer.counts.defined()) continue;
    layer.counts.zero_();
    layer.range_min = layer.bias.min().item<double>() - 1;
    layer.range_max = layer.bias.max().item<double>() + 1;
  }
}

void Balancer::observe(size_t index, const at::Tensor& experts, const at::Tensor& logits,
                       const at::Tensor& cutoff) {
  at::NoGradGuard no_grad;
  Layer& layer = layers_.at(index);
  check(!layer.counts.defined() || layer.range_min < layer.range_max,
        "balance: {}: observe comes after begin_step", layer.name);
  check(experts.dim() == 2 && experts.size(1) == layer.k && logits.size(1) == layer.experts(),
        "balance: {}: expected {} of {} experts, got {} of {}", layer.name, layer.k, layer.experts(),
        experts.size(1), logits.size(1));
  const at::Tensor chosen = experts.reshape(-1).to(at::kLong);
  layer.load.scatter_add_(0, chosen, at::ones_like(chosen));
  if (!layer.probe.defined() && logits.size(0) > 0)
    layer.probe = logits.narrow(0, 0, std::min(kProbeTokens, logits.size(0))).sigmoid();
  if (layer.counts.defined() &&
      layer.k < layer.experts())  // with k = E there is no cutoff and nothing to balance
    ops::qb_histogram_of_logits(logits, cutoff, layer.range_min, layer.range_max, layer.counts);
}

BalanceReport Balancer::end_step(int64_t batch_tokens, const Reduce& reduce) {
  at::NoGradGuard no_grad;
  BalanceReport report;
  if (reduce) {
    std::vector<at::Tensor> all;
    for (const Layer& layer : layers_) {
      all.push_back(layer.load);
      if (layer.counts.defined()) all.push_back(layer.counts);
    }
    reduce(all);
  }
  for (Layer& layer : layers_) {
    const auto seen = layer.load.sum().item<int64_t>();
    check(seen == batch_tokens * layer.k, "balance: {}: {} tokens were counted, the batch has {}", layer.name,
          static_cast<double>(seen) / static_cast<double>(layer.k), batch_tokens);
    LayerBalance balance = measure(layer);
    const at::Tensor before = layer.bias.clone();
    if (batch_tokens > 0) update_bias(layer, batch_tokens);
    balance.flip_rate = flip_rate(layer.probe, before, layer.bias, layer.k);
    raise_alarms(layer, balance, report);
    report.layers.push_back(balance);
  }
  return report;
}

void Balancer::update_bias(Layer& layer, int64_t batch_tokens) {
  const int64_t experts = layer.experts();
  if (layer.k == experts) return;
  const double q =
      static_cast<double>(batch_tokens) * static_cast<double>(layer.k) / static_cast<double>(experts);
  if (options_.method == BalanceMethod::kQuantile) {
    const auto counted = layer.counts.sum().item<int64_t>();
    check(counted == batch_tokens * experts, "balance: {}: the histogram holds {} scores, expected {}",
          layer.name, counted, batch_tokens * experts);
    at::Tensor bias = quantile_from_histogram(layer.counts, layer.range_min, layer.range_max, q);
    if (options_.ema > 0) bias = options_.ema * layer.bias.to(at::kDouble) + (1 - options_.ema) * bias;
    layer.bias.copy_(bias - bias.mean());
  } else if (options_.method == BalanceMethod::kSign) {
    // DeepSeek-V3 (arXiv:2412.19437 section 2.1.2): an expert above the mean load loses sign_rate, one below
    // gains it.
    layer.bias.add_(at::sign(q - layer.load.to(at::kDouble)).to(at::kFloat), options_.sign_rate);
  }
}

LayerBalance Balancer::measure(Layer& layer) {
  const at::Tensor load = layer.load.to(at::kCPU);
  LayerBalance out{.batch = load_stats(load)};
  layer.recent.mul_(1.0 - 1.0 / static_cast<double>(options_.window)).add_(load);
  layer.idle.add_(1).mul_(load == 0);
  const LoadStats windowed = load_stats(layer.recent);
  out.windowed_max_vio = windowed.max_vio;
  out.windowed_entropy = windowed.entropy;
  out.windowed_dead = (layer.idle >= options_.window).sum().item<int64_t>();
  return out;
}

void Balancer::raise_alarms(Layer& layer, const LayerBalance& balance, BalanceReport& report) const {
  auto* in_a_row = layer.alarm.mutable_data_ptr<int64_t>();
  const auto experts = static_cast<double>(layer.experts());
  const auto watch = [&](size_t which, bool beyond, const std::string& what) {
    in_a_row[which] = beyond ? in_a_row[which] + 1 : 0;
    if (in_a_row[which] < options_.alarm_steps) return;
    report.alarms.push_back(fmt::format("{}: {}, for {} steps", layer.name, what, in_a_row[which]));
    report.remind |= in_a_row[which] % options_.alarm_steps == 0;
  };
  watch(0, options_.alarm_max_vio > 0 && balance.windowed_max_vio > options_.alarm_max_vio,
        fmt::format("MaxVio {:.2f} over the last {} steps, above {}", balance.windowed_max_vio,
                    options_.window, options_.alarm_max_vio));
  watch(1,
        options_.alarm_dead_share > 0 &&
            static_cast<double>(balance.windowed_dead) > options_.alarm_dead_share * experts,
        fmt::format("{} of {} experts without a token in the last {} steps", balance.windowed_dead,
                    layer.experts(), options_.window));
  watch(2, balance.windowed_entropy < options_.alarm_entropy,
        fmt::format("the router has collapsed: entropy {:.2f} of its largest value, below {}",
                    balance.windowed_entropy, options_.alarm_entropy));
}

std::vector<at::Tensor> Balancer::recent_loads() const {
  std::vector<at::Tensor> out;
  for (const Layer& layer : layers_) out.push_back(layer.recent);
  return out;
}

void Balancer::for_each_state(const StateVisitor& visit) {
  for (Layer& layer : layers_) {
    visit(layer.name + ".recent_load", layer.recent);
    visit(layer.name + ".idle_steps", layer.idle);
    visit(layer.name + ".alarm_steps", layer.alarm);
  }
}

void Balancer::load_state(const StateMap& saved) {
  at::NoGradGuard no_grad;
  load_state_strict(
      "balance", [&](const StateVisitor& visit) { for_each_state(visit); }, saved);
}

}  // namespace godwit
