#include "godwit/rl/objective.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "godwit/base/check.h"

namespace godwit::rl {
namespace {

using at::Tensor;

// exp of a log-ratio is taken inside these bounds, so that neither it nor its gradient overflows; a ratio
// that far out is a fault elsewhere, and the statistics show it.
constexpr double kLogRatioLimit = 20;
const double kLn2 = std::log(2.0);

Tensor exp_within(const Tensor& log_ratio) {
  return log_ratio.clamp(-kLogRatioLimit, kLogRatioLimit).exp();
}

// The model's tokens alone, in fp64: a sum over a long trajectory has to be exact to more than fp32.
struct Tokens {
  Tensor logp, behaviour, old, reference, advantage, sequence, weight, entropy;
};

Tensor pick(const Tensor& values, const Tensor& index, const char* what, int64_t size) {
  if (!values.defined()) return {};
  check(values.dim() == 1 && values.size(0) == size, "policy loss: {} has {} elements, the mask {}", what,
        values.numel(), size);
  Tensor out = values.index_select(0, index.to(values.device()));
  if (out.is_floating_point()) {
    out = out.to(at::kDouble);
    check(at::isfinite(out).all().item<bool>(), "policy loss: {} is not finite at a model token", what);
  }
  return out;
}

Tokens model_tokens(const PolicyBatch& b) {
  check(b.mask.defined() && b.logp.defined() && b.behaviour.defined() && b.advantage.defined() &&
            b.weight.defined(),
        "policy loss: logp, behaviour, advantage, mask and weight are needed");
  const int64_t size = b.mask.numel();
  const Tensor index = at::nonzero(b.mask).flatten();
  Tokens t;
  t.logp = pick(b.logp, index, "logp", size);
  t.behaviour = pick(b.behaviour, index, "behaviour", size);
  t.old = b.old.defined() ? pick(b.old, index, "old", size) : t.behaviour;
  t.reference = pick(b.reference, index, "reference", size);
  t.advantage = pick(b.advantage, index, "advantage", size);
  t.sequence = pick(b.sequence, index, "sequence", size);
  t.weight = pick(b.weight, index, "weight", size);
  t.entropy = pick(b.entropy, index, "entropy", size);
  return t;
}

// A loss for each token and which tokens' policy gradient it cut.
struct Surrogate {
  Tensor loss, cut;
};

// Clip in log space: the same values as clamp(exp), and no 0 * inf in its gradient.
Surrogate clip_band(const ObjectiveOptions& o, const Tokens& t) {
  const Tensor log_ratio = t.logp - t.behaviour;
  const double low = std::log(o.ratio_min), high = std::log(o.ratio_max);
  return {.loss = -log_ratio.clamp(low, high).exp() * t.advantage,
          .cut = log_ratio.lt(low).logical_or(log_ratio.gt(high))};
}

Surrogate clipped_minimum(const ObjectiveOptions& o, const Tensor& ratio, const Tensor& advantage) {
  const Tensor plain = ratio * advantage;
  const Tensor clipped = ratio.clamp(1 - o.clip_low, 1 + o.clip_high) * advantage;
  return {.loss = -at::minimum(plain, clipped), .cut = clipped.lt(plain)};
}

Surrogate sequence_ratio(const ObjectiveOptions& o, const Tokens& t) {
  check(t.sequence.defined(), "policy loss: this objective needs the sequence of each token");
  const Tensor log_ratio = (t.logp - t.old).detach();
  const int64_t sequences = t.sequence.numel() > 0 ? t.sequence.max().item<int64_t>() + 1 : 0;
  const Tensor sums = at::zeros({sequences}, log_ratio.options()).index_add(0, t.sequence, log_ratio);
  const Tensor counts =
      at::zeros({sequences}, log_ratio.options()).index_add(0, t.sequence, at::ones_like(log_ratio));
  const Tensor ratio = exp_within(sums / counts.clamp_min(1)).index_select(0, t.sequence);
  return clipped_minimum(o, ratio * (t.logp - t.logp.detach()).exp(), t.advantage);
}

Surrogate clipped_weight(const ObjectiveOptions& o, const Tokens& t) {
  const Tensor ratio = exp_within(t.logp - t.old).detach();
  const Tensor weight = ratio.clamp(1 - o.clip_low, 1 + o.clip_high);
  return {.loss = -weight * t.advantage * t.logp, .cut = at::zeros_like(ratio, at::kBool)};
}

Surrogate surrogate(const ObjectiveOptions& o, const Tokens& t) {
  switch (o.objective) {
    case Objective::kClipBand:
      return clip_band(o, t);
    case Objective::kGspo:
      return sequence_ratio(o, t);
    case Objective::kCispo:
      return clipped_weight(o, t);
    case Objective::kGrpo:
    case Objective::kDrGrpo:
    case Objective::kDapo:
    case Objective::kDecoupled:
      break;
  }
  return clipped_minimum(o, exp_within(t.logp - t.old), t.advantage);
}

void correct(const ObjectiveOptions& o, const Tokens& t, Surrogate& s) {
  if (o.correction == Correction::kNone) return;
  const Tensor ratio = exp_within(t.old - t.behaviour).detach();
  Tensor factor = ratio;
  if (o.correction == Correction::kTruncate) factor = ratio.clamp_max(o.correction_max);
  if (o.correction == Correction::kMask) {
    const Tensor inside = ratio.ge(o.correction_min).logical_and(ratio.le(o.correction_max));
    factor = ratio * inside;
    s.cut = s.cut.logical_or(inside.logical_not());
  }
  s.loss = s.loss * factor;
}

PolicyStats statistics(const Tokens& t, const Tensor& cut) {
  const at::NoGradGuard no_grad;
  const Tensor delta = t.logp.detach() - t.behaviour;
  const Tensor ratio = exp_within(delta);
  const auto sum = [](const Tensor& x) { return x.to(at::kDouble).sum().item<double>(); };
  PolicyStats s;
  s.tokens = static_cast<double>(delta.numel());
  if (delta.numel() == 0) return s;
  s.abs_delta = sum(delta.abs());
  s.max_delta = delta.abs().max().item<double>();
  s.k3 = sum(ratio - delta - 1);
  s.over_ln2 = sum(delta.abs().gt(kLn2));
  s.ratio = sum(ratio);
  s.ratio_squared = sum(ratio.square());
  s.cut = sum(cut);
  s.entropy = t.entropy.defined() ? sum(t.entropy) : 0;
  return s;
}

}  // namespace

ObjectiveOptions default_options(Objective objective) {
  ObjectiveOptions o;
  o.objective = objective;
  if (objective != Objective::kClipBand) o.tau = 0;
  switch (objective) {
    case Objective::kClipBand:
    case Objective::kCispo:
      break;
    case Objective::kGrpo:
      o.mean = TokenMean::kSequences;
      break;
    case Objective::kDrGrpo:
      o.mean = TokenMean::kConstant;
      break;
    case Objective::kDapo:
      o.mean = TokenMean::kGroupTokens;
      o.clip_high = 0.28;
      break;
    case Objective::kGspo:
      o.mean = TokenMean::kSequences;
      o.clip_low = 3e-4;
      o.clip_high = 4e-4;
      break;
    case Objective::kDecoupled:
      o.correction = Correction::kWeight;
      break;
  }
  return o;
}

at::Tensor token_weights(const ObjectiveOptions& options, const at::Tensor& mask, const at::Tensor& sequence,
                         const std::vector<int64_t>& group) {
  check(mask.dim() == 1 && sequence.sizes() == mask.sizes(), "token weights: mask and sequence differ");
  const at::Tensor on = mask.to(at::kCPU, at::kBool).contiguous();
  const at::Tensor of = sequence.to(at::kCPU, at::kLong).contiguous();
  const auto sequences = static_cast<int64_t>(group.size());
  std::vector<double> tokens(sequences, 0.0);
  double all = 0;
  for (int64_t i = 0; i < on.numel(); ++i) {
    const int64_t s = of.data_ptr<int64_t>()[i];
    check(s >= 0 && s < sequences, "token weights: sequence {} of {}", s, sequences);
    if (!on.data_ptr<bool>()[i]) continue;
    tokens[s] += 1;
    all += 1;
  }
  std::map<int64_t, double> group_sequences, group_tokens;
  for (int64_t s = 0; s < sequences; ++s) {
    group_sequences[group[s]] += 1;
    group_tokens[group[s]] += tokens[s];
  }
  const auto groups = static_cast<double>(group_sequences.size());
  const auto divisor = [&](int64_t s) {
    switch (options.mean) {
      case TokenMean::kTokens:
        return all;
      case TokenMean::kGroupTokens:
        return groups * group_tokens[group[s]];
      case TokenMean::kSequences:
        return groups * group_sequences[group[s]] * tokens[s];
      case TokenMean::kConstant:
        return groups * group_sequences[group[s]] * options.constant_tokens;
    }
    return all;
  };
  at::Tensor out = at::zeros({on.numel()}, at::kDouble);
  for (int64_t i = 0; i < on.numel(); ++i)
    if (on.data_ptr<bool>()[i]) out.data_ptr<double>()[i] = 1 / divisor(of.data_ptr<int64_t>()[i]);
  return out.to(mask.device());
}

void PolicyStats::add(const PolicyStats& other) {
  tokens += other.tokens;
  abs_delta += other.abs_delta;
  max_delta = std::max(max_delta, other.max_delta);
  k3 += other.k3;
  over_ln2 += other.over_ln2;
  ratio += other.ratio;
  ratio_squared += other.ratio_squared;
  cut += other.cut;
  entropy += other.entropy;
}

PolicyLoss policy_loss(const ObjectiveOptions& options, const PolicyBatch& batch) {
  const Tokens t = model_tokens(batch);
  Surrogate s = surrogate(options, t);
  correct(options, t, s);
  Tensor loss = s.loss;
  if (options.tau != 0) loss = loss + options.tau * (t.logp - t.behaviour).square();
  if (options.kl != 0) {
    check(t.reference.defined(), "policy loss: kl {} needs the reference's log-probabilities", options.kl);
    const Tensor d = t.reference - t.logp;
    loss = loss + options.kl * (exp_within(d) - d - 1);
  }
  return {.loss = (loss * t.weight).sum(), .stats = statistics(t, s.cut)};
}

}  // namespace godwit::rl
