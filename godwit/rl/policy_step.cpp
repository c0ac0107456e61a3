#include "godwit/rl/policy_step.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>

#include "godwit/base/check.h"
#include "godwit/io/mxfp4.h"
#include "godwit/model/forward.h"
#include "godwit/model/segments.h"
#include "godwit/ops/ops.h"
#include "godwit/rl/replay.h"

namespace godwit::rl {
namespace {

// To the nearest weights that MXFP4 can say, as `godwit convert` chooses them.
void round_to_mxfp4(const at::Tensor& from, at::Tensor to) {
  const at::Tensor wide = from.to(at::kCPU, at::kFloat).contiguous();
  const int64_t size = wide.numel();
  std::vector<uint8_t> packed(size / 2), scales(size / io::kMxfp4Group);
  io::mxfp4_quantize(std::span(wide.data_ptr<float>(), static_cast<size_t>(size)), packed, scales,
                     io::Mxfp4ScaleRule::kCompressedTensors);
  at::Tensor back = at::empty_like(wide);
  io::mxfp4_dequantize(packed, scales, std::span(back.data_ptr<float>(), static_cast<size_t>(size)));
  to.copy_(back);
}

// What the tower makes of the trajectories' pictures, with gradient; undefined where there are none.
at::Tensor pictures_of(const LoadedModel& model, const std::vector<const Trajectory*>& trajectories) {
  MediaList all;
  for (const Trajectory* t : trajectories) all.insert(all.end(), t->media.begin(), t->media.end());
  if (all.empty()) return {};
  return vision_forward(model.config, *model.weights.vision, vision_input(*model.config.vision, all));
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
        const bool known = replayed_t && !replayed_t->entropy.empty();
        entropy.push_back(known ? replayed_t->entropy[i] : -t.logp[i]);  // or an estimate of it
        sequence.push_back(static_cast<int64_t>(trajectories.size()));
        at.push_back(i);
        present.push_back(s.is_of(version));
      }
    }
    trajectories.push_back(&t);
  }
};

// Of every weight, or of its master where there is one.
std::vector<OptimizerParam> PolicyStep::optimizer_params() {
  std::vector<OptimizerParam> params;
  for_each_param(model_.config, model_.weights, [&](const ParamInfo& info, at::Tensor& value) {
    at::Tensor moved = value;
    if (options_.mxfp4_experts && info.role == ParamRole::kExperts) {
      check(value.size(-1) % io::kMxfp4Group == 0,
            "{}: rows of {} values are not whole groups of {}, which MXFP4 needs", info.name, value.size(-1),
            io::kMxfp4Group);
      moved = value.detach().clone();
      masters_.push_back({.name = info.name, .value = moved, .rounded = value});
    }
    params.push_back({.info = info, .value = moved, .grad = {}});
  });
  return params;
}

void PolicyStep::round_experts() {
  const at::NoGradGuard no_grad;
  for (const Master& m : masters_) round_to_mxfp4(m.value, m.rounded);
}

void PolicyStep::for_each_state(const StateVisitor& visit) {
  optimizer_.for_each_state(visit);
  for (Master& m : masters_) visit("master." + m.name, m.value);
}

PolicyStep::PolicyStep(LoadedModel& model, PolicyStepOptions options)
    : model_(model),
      options_(std::move(options)),
      forbidden_(rollout_forbidden(model)),
      optimizer_(options_.optimizer, optimizer_params()) {
  check(!options_.deterministic || model.weights.embed.scalar_type() == at::kFloat,
        "reinforcement learning: the deterministic mode needs fp32 weights");
  check(options_.temperature > 0, "reinforcement learning: the temperature must be positive, got {}",
        options_.temperature);
  allowed_ = at::nonzero(forbidden_.logical_not()).flatten();
  place_ = at::full({forbidden_.numel()}, -1, at::kLong);
  place_.index_copy_(0, allowed_, at::arange(allowed_.numel(), at::kLong));
  set_requires_grad(model.config, model.weights, true);
  round_experts();
}

// Tokens that the present weights drew: what was recorded for them against `logp`.
void PolicyStep::compare(const Micro& m, const at::Tensor& logp, PolicyStepResult& result) const {
  const auto* now = logp.data_ptr<double>();
  for (size_t i = 0; i < m.present.size(); ++i) {
    if (m.present[i] == 0) continue;
    const double d = std::abs(now[i] - m.behaviour[i]);
    const Trajectory& t = *m.trajectories[m.sequence[i]];
    check(!options_.deterministic || d == 0,  // NaN is a difference
          "deterministic mode: trainer and rollout differ at token {} of sample {} of group {}: {:.17g} "
          "against "
          "{:.17g}. This device or dtype does not promise equal bits: set train.deterministic = false",
          m.at[i], t.sample, t.group, now[i], m.behaviour[i]);
    result.max_dlogp = std::max(result.max_dlogp, d);
    result.mean_dlogp += d;
    ++result.present_tokens;
  }
}

// -log pi_theta of the tokens from `first` on, one for each row of `hidden`, summed with `weight`, and each
// of them [n] without gradient. hidden [n, D]: what the tokens are drawn from.
std::tuple<at::Tensor, at::Tensor> PolicyStep::score(const Micro& m, const at::Tensor& hidden, int64_t first,
                                                     const at::Tensor& weight) const {
  const at::Tensor x = options_.temperature != 1 ? hidden / options_.temperature : hidden;
  const at::Tensor head =
      head_weight(model_.config, model_.weights).index_select(0, allowed_.to(model_.device));
  const auto wanted = std::vector<int64_t>(m.targets.begin() + first, m.targets.begin() + first + x.size(0));
  const at::Tensor targets = place_.index_select(0, at::tensor(wanted, at::kLong)).to(model_.device);
  return ops::linear_cross_entropy(x, head, targets, weight);
}

// d loss / d (-logp) of each token, fp32 on the model's device. chunk [n] fp64: the log-probabilities of the
// chunked forward; deterministic mode takes the replayed ones instead. The loss that is sent back through the
// model is linear in the log-probabilities, so that the logits are never all held.
at::Tensor PolicyStep::objective(const Micro& m, const at::Tensor& chunk, PolicyStepResult& result) const {
  const auto reals = [](const std::vector<double>& v) { return at::tensor(v, at::kDouble); };
  at::Tensor logp_values = chunk;
  if (options_.deterministic) {
    const at::Tensor replayed = reals(m.replayed);
    logp_values = at::where(replayed.isnan(), chunk, replayed);
  }
  result.mean_drift += (logp_values - chunk).abs().sum().item<double>();
  compare(m, logp_values, result);
  const at::AutoGradMode with_graph(true);
  const at::Tensor logp = logp_values.clone().set_requires_grad(true);
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
  result.loss += objective.loss.item<double>();
  result.stats.add(objective.stats);
  return logp.grad().neg().to(model_.device, at::kFloat);
}

// Forward, objective, backward of whole trajectories at once.
void PolicyStep::micro_batch(const Micro& m, PolicyStepResult& result) {
  const at::Device device = model_.device;
  ForwardOptions forward;
  forward.recompute = options_.recompute;
  const PackedBatch batch{.ids = at::tensor(m.ids, at::kLong).to(device),
                          .cu_seqlens = make_cu_seqlens(m.lengths),
                          .media = pictures_of(model_, m.trajectories)};
  const at::Tensor x = forward_hidden(model_.config, model_.weights, batch, nullptr, forward)
                           .index_select(0, at::tensor(m.rows, at::kLong).to(device));
  at::Tensor chunk;
  {
    const at::NoGradGuard no_grad;
    const at::Tensor ones = at::ones({x.size(0)}, x.options().dtype(at::kFloat));
    chunk = std::get<1>(score(m, x.detach(), 0, ones)).neg().to(at::kCPU, at::kDouble);
  }
  std::get<0>(score(m, x, 0, objective(m, chunk, result))).backward();
}

// The same for one long trajectory, a segment at a time.
void PolicyStep::segmented(const Micro& m, PolicyStepResult& result) {
  const at::Device device = model_.device;
  const at::Tensor pictures = pictures_of(model_, m.trajectories);
  SegmentedSequence sequence(model_.config, model_.weights, at::tensor(m.ids, at::kLong).to(device),
                             options_.segment_tokens, pictures);
  // The drawn tokens whose hidden states lie in the segment, as [first, first + n), and these states.
  const auto part = [&](int64_t begin, const at::Tensor& hidden) {
    const auto from = std::lower_bound(m.rows.begin(), m.rows.end(), begin);
    const auto to = std::lower_bound(from, m.rows.end(), begin + hidden.size(0));
    std::vector<int64_t> rows(from, to);
    for (int64_t& row : rows) row -= begin;
    return std::pair(static_cast<int64_t>(from - m.rows.begin()),
                     hidden.index_select(0, at::tensor(rows, at::kLong).to(device)));
  };
  at::Tensor chunk = at::zeros({static_cast<int64_t>(m.rows.size())}, at::kDouble);
  sequence.forward([&](int64_t begin, const at::Tensor& hidden) {
    const auto [first, x] = part(begin, hidden);
    if (x.size(0) == 0) return;
    const at::Tensor nll =
        std::get<1>(score(m, x, first, at::ones({x.size(0)}, x.options().dtype(at::kFloat))));
    chunk.narrow(0, first, x.size(0)).copy_(nll.neg());
  });
  const at::Tensor weight = objective(m, chunk, result);
  sequence.backward([&](int64_t begin, const at::Tensor& hidden) {
    const auto [first, x] = part(begin, hidden);
    if (x.size(0) == 0) return at::Tensor();
    return std::get<0>(score(m, x, first, weight.narrow(0, first, x.size(0))));
  });
  if (pictures.defined() && pictures.requires_grad() && sequence.media_grad().defined())
    pictures.backward(sequence.media_grad());
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
  const bool repeated = !samples.front().repeated.empty();
  if (options_.deterministic && !repeated)
    replayed = replay(model_, trajectories, forbidden_, options_.temperature);
  for (const PolicySample& sample : samples) {
    if (options_.deterministic && repeated) replayed.push_back({.logp = sample.repeated, .entropy = {}});
  }

  // Those that go alone, in segments.
  const auto is_long = [&](size_t i) {
    return options_.segment_tokens > 0 &&
           static_cast<int64_t>(trajectories[i]->ids.size()) > options_.segment_tokens;
  };
  size_t drawn = 0;
  for (size_t first = 0; first < samples.size();) {
    Micro m;
    size_t last = first;
    for (; last < samples.size(); ++last) {
      const Trajectory& t = *trajectories[last];
      if (last > first &&
          (is_long(first) || is_long(last) ||
           (options_.micro_batch_tokens > 0 &&
            static_cast<int64_t>(m.ids.size() + t.ids.size()) > options_.micro_batch_tokens))) {
        break;
      }
      const size_t begin = m.at.size();
      m.add(t, version, options_.deterministic ? &replayed[last] : nullptr);
      for (size_t i = begin; i < m.at.size(); ++i) {
        m.advantage.push_back(advantage_at(samples[last], m.at[i]));
        m.weight.push_back(weights.data_ptr<double>()[drawn++]);
      }
    }
    if (!m.rows.empty() && is_long(first))
      segmented(m, result);
    else if (!m.rows.empty())
      micro_batch(m, result);
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

void PolicyStepResult::add_compared(const PolicyStepResult& other) {
  const int64_t all = present_tokens + other.present_tokens;
  if (all == 0) return;
  max_dlogp = std::max(max_dlogp, other.max_dlogp);
  mean_dlogp = (mean_dlogp * static_cast<double>(present_tokens) +
                other.mean_dlogp * static_cast<double>(other.present_tokens)) /
               static_cast<double>(all);
  present_tokens = all;
}

PolicyStepResult PolicyStep::verify(std::span<const PolicySample> samples, int64_t version) {
  PolicyStepResult result;
  if (!options_.deterministic || samples.empty()) return result;
  std::vector<const Trajectory*> trajectories;
  for (const PolicySample& sample : samples) trajectories.push_back(sample.trajectory);
  std::vector<Replayed> replayed;
  if (samples.front().repeated.empty())
    replayed = replay(model_, trajectories, forbidden_, options_.temperature);
  else
    for (const PolicySample& sample : samples) replayed.push_back({.logp = sample.repeated, .entropy = {}});
  Micro m;
  for (size_t i = 0; i < samples.size(); ++i) m.add(*trajectories[i], version, &replayed[i]);
  compare(m, at::tensor(m.replayed, at::kDouble), result);
  if (result.present_tokens > 0) result.mean_dlogp /= static_cast<double>(result.present_tokens);
  return result;
}

PolicyStepResult PolicyStep::run(std::span<const PolicySample> samples, int64_t version,
                                 double lr_multiplier) {
  PolicyStepResult result = backward(samples, version);
  if (result.stats.tokens == 0) return result;
  for (const Master& m : masters_) optimizer_.set_gradient(m.name, m.rounded.grad());
  const OptimizerStep done = optimizer_.step(lr_multiplier);
  check(done.applied, "the gradient of {} is not finite", done.not_finite);
  round_experts();
  result.grad_norm = done.grad_norm;
  return result;
}

}  // namespace godwit::rl
