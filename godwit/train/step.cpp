#include "godwit/train/step.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "godwit/base/check.h"
#include "godwit/ops/ops.h"
#include "godwit/train/held_out.h"
#include "godwit/train/qk_clip.h"

namespace godwit {
namespace {

std::vector<OptimizerParam> optimizer_params(const ModelConfig& config, ModelWeights& weights) {
  std::vector<OptimizerParam> params;
  for_each_param(config, weights, [&](const ParamInfo& info, at::Tensor& value) {
    params.push_back({.info = info, .value = value, .grad = {}});
  });
  return params;
}

void append(data::PackedBatch& to, const data::PackedBatch& from) {
  const int64_t shift = static_cast<int64_t>(to.ids.size());
  to.ids.insert(to.ids.end(), from.ids.begin(), from.ids.end());
  to.targets.insert(to.targets.end(), from.targets.begin(), from.targets.end());
  for (size_t n = 1; n < from.cu_seqlens.size(); ++n) to.cu_seqlens.push_back(from.cu_seqlens[n] + shift);
  to.media.insert(to.media.end(), from.media.begin(), from.media.end());
  to.pixels.insert(to.pixels.end(), from.pixels.begin(), from.pixels.end());
  if (!from.media.empty()) to.values = from.values;  // the same for all data of a run (train/setup)
}

// The rank's share of the sequences of one batch, a run of them, `rows` to a micro-batch. The first ranks
// have one more where they do not come out even; with fewer sequences than ranks the last ones have none.
std::vector<data::PackedBatch> micro_batches(const data::PackedLoader& loader, int64_t batch,
                                             int64_t micro_tokens, const dist::Group& group) {
  const data::LoaderOptions& o = loader.options();
  const int64_t each = o.batch_sequences / group.size(), more = o.batch_sequences % group.size();
  const int64_t first = group.rank() * each + std::min(group.rank(), more);
  const int64_t count = each + (group.rank() < more ? 1 : 0);
  const int64_t rows = micro_tokens > 0 ? std::max<int64_t>(1, micro_tokens / o.sequence_length) : count;
  std::vector<data::PackedBatch> out;
  const auto begin = static_cast<uint64_t>(batch * o.batch_sequences + first);
  loader.prepare(begin, static_cast<uint64_t>(count));
  for (int64_t i = 0; i < count; i += rows) {
    std::vector<data::PackedBatch> parts;
    size_t bytes = 0;
    for (int64_t n = i; n < std::min(i + rows, count); ++n) {
      parts.push_back(loader.sequence(begin + static_cast<uint64_t>(n)));
      bytes += parts.back().pixels.size();
    }
    out.emplace_back().pixels.reserve(bytes);  // tens of megabytes, which should not move as they grow
    for (const data::PackedBatch& part : parts) append(out.back(), part);
  }
  loader.prepare(begin + static_cast<uint64_t>(o.batch_sequences), static_cast<uint64_t>(count));
  return out;
}

int64_t count_targets(const std::vector<data::PackedBatch>& batches) {
  int64_t targets = 0;
  for (const data::PackedBatch& batch : batches)
    for (const int64_t target : batch.targets) targets += target != data::kNoTarget;
  return targets;
}

// Ends a step early: a forward that is not finite has no meaningful routing, so nothing after it is computed.
struct NotFinite {
  std::string what;
};

// Seconds since it was made or last asked.
class Lap {
 public:
  double take() {
    const auto now = std::chrono::steady_clock::now();
    return std::chrono::duration<double>(now - std::exchange(last_, now)).count();
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

bool has_router_loss(const BalanceOptions& o) {
  return (o.method == BalanceMethod::kAuxLoss && o.aux_coefficient > 0) || o.entropy_regularisation > 0;
}

bool all_finite(const at::Tensor& tensor) {
  return at::isfinite(tensor).all().item<bool>();
}

// Autograd adds up gradients in the weights' own dtype: enough for these, too coarse for bf16.
bool sums_exactly(const at::Tensor& value) {
  return value.scalar_type() == at::kFloat || value.scalar_type() == at::kDouble;
}

// Norm of all gradients of each decoder layer.
std::vector<double> by_layer(const std::vector<OptimizerRule>& rules, const std::vector<double>& norms,
                             int64_t layers) {
  std::vector<double> squares(layers, 0.0);
  for (size_t i = 0; i < std::min(rules.size(), norms.size()); ++i) {
    const size_t at = rules[i].name.find("layers.");
    if (at != std::string::npos) squares[std::stoll(rules[i].name.substr(at + 7))] += norms[i] * norms[i];
  }
  for (double& square : squares) square = std::sqrt(square);
  return squares;
}

// Norm of all gradients of the vision tower and projector.
double of_vision(const std::vector<OptimizerRule>& rules, const std::vector<double>& norms) {
  double square = 0;
  for (size_t i = 0; i < std::min(rules.size(), norms.size()); ++i) {
    if (rules[i].name.starts_with("vision_tower.") || rules[i].name.starts_with("mm_projector."))
      square += norms[i] * norms[i];
  }
  return std::sqrt(square);
}

}  // namespace

TrainStep::TrainStep(const Recipe& recipe, const ModelConfig& config, ModelWeights& weights,
                     at::Device device, dist::Group& group)
    : recipe_(recipe),
      config_(config),
      weights_(weights),
      device_(device),
      group_(group),
      optimizer_(recipe.optimizer, optimizer_params(config, weights)),
      balancer_(recipe.balance),
      moe_index_(config.layers, -1) {
  for_each_param(config, weights, [&](const ParamInfo& info, at::Tensor& value) {
    params_.push_back({.name = info.name, .value = value, .grad = {}});
  });
  for (int64_t i = 0; i < config.layers; ++i) {
    if (!config.is_moe(i)) continue;
    moe_index_[i] = static_cast<int64_t>(balancer_.layers());
    balancer_.add_layer("layer " + std::to_string(i), weights.layers[i].moe->router_bias,
                        config.moe.experts_per_token);
  }
}

ForwardOptions TrainStep::forward_options(int64_t batch_tokens) {
  ForwardOptions options;
  options.recompute = recipe_.train.recompute == Recompute::kBlock;
  options.on_router = [this](const RouterTrace& t) {
    if (!all_finite(t.cutoff)) {
      throw NotFinite{"the router's scores of layer " + std::to_string(t.layer) + " are not finite"};
    }
    balancer_.observe(moe_index_[t.layer], t.experts, t.logits, t.cutoff);
  };
  if (has_router_loss(recipe_.balance)) {
    options.router_loss = [this, batch_tokens](const RouterTrace& t) {
      return balance_loss(recipe_.balance, t.logits, t.experts, t.cu_seqlens, batch_tokens);
    };
  }
  if (recipe_.optimizer.qk_clip > 0) {
    options.qk_limit = recipe_.optimizer.qk_clip;
    options.on_max_logit = [this](int64_t layer, const at::Tensor& m) {
      at::Tensor& largest = max_logits_[layer];
      largest = largest.defined() ? at::maximum(largest, m) : m;
    };
  }
  return options;
}

// This rank's part of the loss.
double TrainStep::forward_backward(const ModelConfig& config, const MicroBatches& batches,
                                   StepResult& result) {
  const double targets = group_.sum(std::vector<double>{static_cast<double>(count_targets(batches))})[0];
  check(targets > 0, "a training batch without any target");
  ForwardOptions options = forward_options(result.tokens);
  std::vector<at::Tensor> squares;
  double loss_sum = 0;
  for (size_t i = 0; i < batches.size(); ++i) {
    DeviceBatch b = to_device(batches[i], device_);
    encode_pictures(config, weights_, b);
    options.on_layer = nullptr;
    if (i == 0) {
      options.on_layer = [&](int64_t, const at::Tensor& stream) {
        squares.push_back(stream.to(at::kFloat).square().mean());
      };
    }
    const at::Tensor hidden = forward_hidden(config, weights_, b.packed, nullptr, options);
    const at::Tensor weight = at::full({hidden.size(0)}, 1.0 / targets, hidden.options().dtype(at::kFloat));
    const at::Tensor loss =
        std::get<0>(ops::linear_cross_entropy(hidden, head_weight(config, weights_), b.targets, weight));
    loss.backward();
    loss_sum += loss.item<double>();
    collect_gradients(/*more=*/i + 1 < batches.size() || group_.size() > 1);
  }
  for (const at::Tensor& square : squares) result.activation_rms.push_back(std::sqrt(square.item<double>()));
  return loss_sum;
}

// Moves what a backward left on the weights to where it is added up. `more`: something will be added to it.
void TrainStep::collect_gradients(bool more) {
  const at::NoGradGuard no_grad;
  for (Param& param : params_) {
    at::Tensor& fresh = param.value.mutable_grad();
    if (!fresh.defined()) continue;
    if (sums_exactly(param.value)) {
      param.grad = fresh;  // the next backward adds to it
      continue;
    }
    if (param.grad.defined())
      param.grad.add_(fresh);
    else
      param.grad = more ? fresh.to(at::kFloat) : fresh;
    fresh = at::Tensor();
  }
}

// Over the ranks, with the loss. A parameter has a gradient when any rank has one.
void TrainStep::sum_gradients(double& loss) {
  if (group_.size() == 1) return;
  std::vector<double> head = {loss};
  for (const Param& param : params_) head.push_back(param.grad.defined() ? 1 : 0);
  head = group_.sum(head);
  loss = head[0];
  std::vector<at::Tensor> grads;
  for (size_t i = 0; i < params_.size(); ++i) {
    Param& param = params_[i];
    if (head[i + 1] == 0) continue;
    const at::ScalarType type = sums_exactly(param.value) ? param.value.scalar_type() : at::kFloat;
    if (!param.grad.defined()) param.grad = at::zeros_like(param.value, param.value.options().dtype(type));
    grads.push_back(param.grad);
  }
  group_.sum(grads);
}

// Where a forward of this rank's batches first leaves the finite numbers.
std::string TrainStep::first_not_finite(const ModelConfig& config, const MicroBatches& batches) {
  const at::NoGradGuard no_grad;
  for (const Param& param : params_)
    if (!all_finite(param.value)) return "the weight " + param.name + " is not finite";
  int64_t layer = -1;
  ForwardOptions options;
  options.on_layer = [&](int64_t i, const at::Tensor& stream) {
    if (layer < 0 && !all_finite(stream)) layer = i;
  };
  for (const data::PackedBatch& batch : batches) {
    DeviceBatch b = to_device(batch, device_);
    encode_pictures(config, weights_, b);
    if (b.packed.media.defined() && !all_finite(b.packed.media))
      return "the output of the vision tower is not finite";
    forward_hidden(config, weights_, b.packed, nullptr, options);
    if (layer >= 0) return "the output of layer " + std::to_string(layer) + " is not finite";
  }
  return "every weight and layer output is finite";
}

std::vector<std::pair<std::string, at::Tensor>> TrainStep::gradients() const {
  std::vector<std::pair<std::string, at::Tensor>> out;
  for (const Param& param : params_) out.emplace_back(param.name, param.grad);
  return out;
}

// The gradient that has grown most over its usual norm.
std::string TrainStep::largest_change(const std::vector<double>& norms) const {
  const std::vector<OptimizerRule> rules = optimizer_.rules();
  size_t worst = 0;
  double most = -1;
  for (size_t i = 0; i < norms.size(); ++i) {
    const double usual = i < usual_norms_.size() ? usual_norms_[i] : 0.0;
    const double ratio = usual > 0 ? norms[i] / usual : 0.0;
    if (ratio > most) most = ratio, worst = i;
  }
  if (norms.empty()) return "there is no gradient";
  return fmt::format("the gradient of {} has grown most: its norm is {:.3g}, {:.1f} times the usual",
                     rules[worst].name, norms[worst], most);
}

void TrainStep::remember_norms(const std::vector<double>& norms) {
  constexpr double kKeep = 0.95;
  if (usual_norms_.empty()) usual_norms_ = norms;
  for (size_t i = 0; i < norms.size(); ++i)
    usual_norms_[i] = kKeep * usual_norms_[i] + (1 - kKeep) * norms[i];
}

void TrainStep::clip_logits(StepResult& result) {
  const MlaConfig& m = config_.mla;
  if (recipe_.optimizer.qk_clip <= 0) return;
  std::vector<int64_t> layers;
  std::vector<at::Tensor> largest;
  for (int64_t i = 0; i < config_.layers; ++i) {
    if (!weights_.layers[i].mla) continue;
    layers.push_back(i);
    const at::Tensor none = at::zeros({m.heads}, at::kFloat);  // a rank without sequences
    largest.push_back(max_logits_[i].defined() ? max_logits_[i].to(at::kCPU, at::kFloat) : none);
  }
  if (layers.empty()) return;
  at::Tensor all = at::stack(largest);
  group_.max(all);
  const MlaHeadDims dims{.heads = m.heads, .nope = m.nope_dim, .rope = m.rope_dim, .value = m.v_dim};
  for (size_t n = 0; n < layers.size(); ++n) {
    const at::Tensor largest_H = all.select(0, static_cast<int64_t>(n));
    result.max_logit = std::max(result.max_logit, largest_H.max().item<double>());
    const QkClipFactors factors = qk_clip_factors(largest_H, dims, recipe_.optimizer.qk_clip);
    if (factors.clipped == 0) continue;
    result.clipped_heads += factors.clipped;
    const std::string attn = config_.prefix() + "model.layers." + std::to_string(layers[n]) + ".self_attn.";
    optimizer_.scale_rows(attn + (m.q_lora_rank > 0 ? "q_b_proj.weight" : "q_proj.weight"), factors.q_rows);
    optimizer_.scale_rows(attn + "kv_b_proj.weight", factors.kv_rows);
  }
}

// The update, unless the gradient is not finite or the loss is a spike.
void TrainStep::apply(const StepInput& input, StepResult& result) {
  for (const Param& param : params_) optimizer_.set_gradient(param.name, param.grad);
  const bool spike = result.loss > input.expected_loss + input.spike_nats;
  const OptimizerStep done =
      optimizer_.step(input.lr_multiplier, [&](const OptimizerStep&) { return !spike; });
  result.grad_norm = done.grad_norm;
  result.layer_grad_norms = by_layer(optimizer_.rules(), done.norms, config_.layers);
  result.vision_grad_norm = of_vision(optimizer_.rules(), done.norms);
  if (!done.not_finite.empty()) {
    result.fault = StepFault::kNotFinite;
    result.what = "the gradient of " + done.not_finite + " is not finite";
  } else if (spike) {
    result.fault = StepFault::kSpike;
    result.what = fmt::format("the loss is {:.4f}, {:.4f} above that of the last steps; {}", result.loss,
                              result.loss - input.expected_loss, largest_change(done.norms));
  } else {
    remember_norms(done.norms);
  }
}

StepResult TrainStep::run(const StepInput& input) {
  StepResult result;
  result.tokens = input.loader.options().batch_sequences * input.loader.options().sequence_length;
  max_logits_.assign(config_.layers, {});
  balancer_.begin_step();
  for (Param& param : params_) {
    param.value.mutable_grad() = at::Tensor();
    param.grad = at::Tensor();
    optimizer_.set_gradient(param.name, {});  // else it would hold the last step's through this one
  }
  Lap lap;
  const auto batches = micro_batches(input.loader, input.batch, recipe_.train.micro_batch_tokens, group_);
  result.seconds.data = lap.take();
  std::optional<std::string> fault;
  try {
    result.loss = forward_backward(input.config, batches, result);
    if (!std::isfinite(result.loss)) throw NotFinite{"the loss is not finite"};
  } catch (const NotFinite& found) {
    fault = found.what + ": " + first_not_finite(input.config, batches);
  }
  fault = group_.first(fault);
  result.seconds.passes = lap.take();
  if (fault) {
    result.loss = std::numeric_limits<double>::quiet_NaN();
    result.fault = StepFault::kNotFinite;
    result.what = *fault;
    return result;
  }
  sum_gradients(result.loss);
  result.seconds.sum = lap.take();
  apply(input, result);
  if (result.fault != StepFault::kNone) return result;
  clip_logits(result);
  result.seconds.optimizer = lap.take();
  result.balance = balancer_.end_step(result.tokens,
                                      [this](const std::vector<at::Tensor>& counts) { group_.sum(counts); });
  result.seconds.balance = lap.take();
  return result;
}

}  // namespace godwit
