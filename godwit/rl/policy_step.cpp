#include "godwit/rl/policy_step.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>

#include "godwit/base/check.h"
#include "godwit/model/forward.h"
#include "godwit/ops/ops.h"
#include "godwit/rl/replay.h"

namespace godwit::rl {
namespace {

std::vector<OptimizerParam> optimizer_params(LoadedModel& model) {
  std::vector<OptimizerParam> params;
  for_each_param(model.config, model.weights, [&](const ParamInfo& info, at::Tensor& value) {
    params.push_back({.info = info, .value = value, .grad = {}});
  });
  return params;
}

double advantage_at(const PolicySample& sample, int64_t at) {
  const auto& turns = sample.trajectory->turns;
  for (size_t k = 0; k < turns.size(); ++k)
    if (at >= turns[k].begin && at < turns[k].end)
      return sample.advantages[k] + (sample.token_advantages.empty() ? 0.0 : sample.token_advantages[at]);
  fail("policy step: token {} of sample {} of group {} belongs to no turn", at, sample.trajectory->sample,
       sample.trajectory->group);
}

}  // namespace

// Some whole trajectories: what the objective needs of each token that the model drew, in order.
struct PolicyStep::Micro {
  std::vector<int64_t> ids, lengths;
  std::vector<int64_t> rows;     // of the packed batch, whose hidden state gives the token
  std::vector<int64_t> targets;  // the token
  std::vector<double> behaviour, advantage, weight, replayed, entropy;
  std::vector<int64_t> sequence;  // index in trajectories
  std::vector<int64_t> at;        // place in its trajectory
  std::vector<uint8_t> present;   // drawn by the present weights
  std::vector<const Trajectory*> trajectories;

  // Everything of sample `t` but advantages and weights.
  void add(const Trajectory& t, int64_t version, const Replayed* replayed_t) {
    const auto base = static_cast<int64_t>(ids.size());
    ids.insert(ids.end(), t.ids.begin(), t.ids.end());
    lengths.push_back(static_cast<int64_t>(t.ids.size()));
    for (const Segment& s : t.segments) {
      for (int64_t i = s.begin; i < s.end; ++i) {
        rows.push_back(base + i - 1);
        targets.push_back(t.ids[i]);
        behaviour.push_back(t.logp[i]);
        if (replayed_t) replayed.push_back(replayed_t->logp[i]);
        entropy.push_back(replayed_t ? replayed_t->entropy[i] : -t.logp[i]);  // or an estimate of it
        sequence.push_back(static_cast<int64_t>(trajectories.size()));
        at.push_back(i);
        present.push_back(s.version == version);
      }
    }
    trajectories.push_back(&t);
  }
};

PolicyStep::PolicyStep(LoadedModel& model, PolicyStepOptions options)
    : model_(model),
      options_(std::move(options)),
      forbidden_(rollout_forbidden(model)),
      optimizer_(options_.optimizer, optimizer_params(model)) {
  check(model.weights.embed.scalar_type() == at::kFloat, "reinforcement learning: the weights must be fp32");
  check(options_.temperature > 0, "reinforcement learning: the temperature must be positive, got {}",
        options_.temperature);
  allowed_ = at::nonzero(forbidden_.logical_not()).flatten();
  place_ = at::full({forbidden_.numel()}, -1, at::kLong);
  place_.index_copy_(0, allowed_, at::arange(allowed_.numel(), at::kLong));
  set_requires_grad(model.config, model.weights, true);
}

// Tokens that the present weights drew: what was recorded for them against `logp`.
void PolicyStep::compare(const Micro& m, const at::Tensor& logp, PolicyStepResult& result) const {
  const auto* now = logp.data_ptr<double>();
  for (size_t i = 0; i < m.present.size(); ++i) {
    if (m.present[i] == 0) continue;
    const double d = std::abs(now[i] - m.behaviour[i]);
    const Trajectory& t = *m.trajectories[m.sequence[i]];
    check(!options_.deterministic || d == 0,
          "deterministic mode: trainer and rollout differ at token {} of sample {} of group {}: {:.17g} "
          "against "
          "{:.17g}. This device or dtype does not promise equal bits: set train.deterministic = false",
          m.at[i], t.sample, t.group, now[i], m.behaviour[i]);
    result.max_dlogp = std::max(result.max_dlogp, d);
    result.mean_dlogp += d;
    ++result.present_tokens;
  }
}

// Forward, objective, backward. The objective's derivative by each log-probability is taken first; the loss
// that is sent back through the model is linear in them, so that the logits are never all held.
void PolicyStep::micro_batch(const Micro& m, PolicyStepResult& result) {
  const auto reals = [](const std::vector<double>& v) { return at::tensor(v, at::kDouble); };
  const at::Device device = model_.device;
  ForwardOptions forward;
  forward.recompute = options_.recompute;
  const PackedBatch batch{.ids = at::tensor(m.ids, at::kLong).to(device),
                          .cu_seqlens = make_cu_seqlens(m.lengths)};
  at::Tensor x = forward_hidden(model_.config, model_.weights, batch, nullptr, forward)
                     .index_select(0, at::tensor(m.rows, at::kLong).to(device));
  if (options_.temperature != 1) x = x / options_.temperature;
  const at::Tensor head = head_weight(model_.config, model_.weights).index_select(0, allowed_.to(device));
  const at::Tensor targets = place_.index_select(0, at::tensor(m.targets, at::kLong)).to(device);

  at::Tensor logp;
  if (options_.deterministic) {
    logp = reals(m.replayed);
  } else {
    const at::NoGradGuard no_grad;
    const at::Tensor ones = at::ones({x.size(0)}, x.options().dtype(at::kFloat));
    const auto [sum, nll] = ops::linear_cross_entropy(x.detach(), head.detach(), targets, ones);
    logp = nll.neg().to(at::kCPU, at::kDouble);
  }
  compare(m, logp, result);
  logp = logp.clone().set_requires_grad(true);
  const PolicyBatch policy{.logp = logp,
                           .behaviour = reals(m.behaviour),
                           .old = {},
                           .reference = {},
                           .advantage = reals(m.advantage),
                           .mask = at::ones({logp.numel()}, at::kBool),
                           .sequence = at::tensor(m.sequence, at::kLong),
                           .weight = reals(m.weight),
                           .entropy = reals(m.entropy)};
  const PolicyLoss objective = policy_loss(options_.objective, policy);
  objective.loss.backward();
  // d loss / d logp on each -logp.
  const at::Tensor weight = logp.grad().neg().to(device, at::kFloat);
  const auto [linear, nll] = ops::linear_cross_entropy(x, head, targets, weight);
  linear.backward();
  result.mean_drift += (logp.detach() + nll.to(at::kCPU, at::kDouble)).abs().sum().item<double>();
  result.loss += objective.loss.item<double>();
  result.stats.add(objective.stats);
}

PolicyStepResult PolicyStep::backward(std::span<const PolicySample> samples, int64_t version) {
  PolicyStepResult result;
  for_each_param(model_.config, model_.weights,
                 [](const ParamInfo&, at::Tensor& value) { value.mutable_grad() = at::Tensor(); });
  std::vector<const Trajectory*> trajectories;
  for (const PolicySample& sample : samples) {
    check(sample.advantages.size() == sample.trajectory->turns.size(),
          "policy step: {} advantages for {} turns", sample.advantages.size(),
          sample.trajectory->turns.size());
    trajectories.push_back(sample.trajectory);
    result.tokens += static_cast<int64_t>(sample.trajectory->ids.size());
  }
  // Weights of the tokens over the whole batch.
  std::vector<int64_t> sequence, group;
  for (size_t i = 0; i < samples.size(); ++i) {
    group.push_back(trajectories[i]->group);
    for (const Segment& s : trajectories[i]->segments)
      sequence.insert(sequence.end(), static_cast<size_t>(s.end - s.begin), static_cast<int64_t>(i));
  }
  if (sequence.empty()) return result;
  const at::Tensor weights =
      token_weights(options_.objective, at::ones({static_cast<int64_t>(sequence.size())}, at::kBool),
                    at::tensor(sequence, at::kLong), group);
  std::vector<Replayed> replayed;
  if (options_.deterministic) replayed = replay(model_, trajectories, forbidden_, options_.temperature);

  size_t drawn = 0;
  for (size_t first = 0; first < samples.size();) {
    Micro m;
    size_t last = first;
    for (; last < samples.size(); ++last) {
      const Trajectory& t = *trajectories[last];
      if (last > first && options_.micro_batch_tokens > 0 &&
          static_cast<int64_t>(m.ids.size() + t.ids.size()) > options_.micro_batch_tokens) {
        break;
      }
      const size_t begin = m.at.size();
      m.add(t, version, options_.deterministic ? &replayed[last] : nullptr);
      for (size_t i = begin; i < m.at.size(); ++i) {
        m.advantage.push_back(advantage_at(samples[last], m.at[i]));
        m.weight.push_back(weights.data_ptr<double>()[drawn++]);
      }
    }
    if (!m.rows.empty()) micro_batch(m, result);
    first = last;
  }
  result.mean_drift = result.stats.mean(result.mean_drift);
  if (result.present_tokens > 0) result.mean_dlogp /= static_cast<double>(result.present_tokens);
  check(options_.deterministic || result.mean_dlogp <= options_.max_mean_dlogp,
        "trainer and rollout differ by {:.4g} nats a token on average, more than the bound {}: the two do "
        "not compute "
        "the same distribution",
        result.mean_dlogp, options_.max_mean_dlogp);
  return result;
}

PolicyStepResult PolicyStep::run(std::span<const PolicySample> samples, int64_t version,
                                 double lr_multiplier) {
  PolicyStepResult result = backward(samples, version);
  if (result.stats.tokens == 0) return result;
  const OptimizerStep done = optimizer_.step(lr_multiplier);
  check(done.applied, "the gradient of {} is not finite", done.not_finite);
  result.grad_norm = done.grad_norm;
  return result;
}

}  // namespace godwit::rl
