#include "godwit/train/step.h"

#include <ATen/ATen.h>

#include <cmath>

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
}

// The sequences of one step, `rows` to a micro-batch.
std::vector<data::PackedBatch> micro_batches(const data::PackedLoader& loader, int64_t step,
                                             int64_t micro_tokens) {
  const data::LoaderOptions& o = loader.options();
  const int64_t rows =
      micro_tokens > 0 ? std::max<int64_t>(1, micro_tokens / o.sequence_length) : o.batch_sequences;
  std::vector<data::PackedBatch> out;
  for (int64_t i = 0; i < o.batch_sequences; ++i) {
    if (i % rows == 0) out.emplace_back();
    append(out.back(), loader.sequence(static_cast<uint64_t>(step * o.batch_sequences + i)));
  }
  return out;
}

// Ends a step early: a forward that is not finite has no meaningful routing, so nothing after it is computed.
struct NotFinite {
  std::string what;
};

bool has_router_loss(const BalanceOptions& o) {
  return (o.method == BalanceMethod::kAuxLoss && o.aux_coefficient > 0) || o.entropy_regularisation > 0;
}

}  // namespace

TrainStep::TrainStep(const Recipe& recipe, const ModelConfig& config, ModelWeights& weights,
                     at::Device device)
    : recipe_(recipe),
      config_(config),
      weights_(weights),
      device_(device),
      optimizer_(recipe.optimizer, optimizer_params(config, weights)),
      balancer_(recipe.balance),
      moe_index_(config.layers, -1) {
  for (int64_t i = 0; i < config.layers; ++i) {
    if (!config.is_moe(i)) continue;
    moe_index_[i] = static_cast<int64_t>(balancer_.layers());
    balancer_.add_layer("layer " + std::to_string(i), weights.layers[i].moe->router_bias,
                        config.moe.experts_per_token);
  }
}

double TrainStep::forward_backward(const ModelConfig& config, const std::vector<data::PackedBatch>& batches,
                                   StepResult& result) {
  int64_t targets = 0;
  for (const data::PackedBatch& batch : batches) {
    result.tokens += static_cast<int64_t>(batch.ids.size());
    for (const int64_t target : batch.targets) targets += target != data::kNoTarget;
  }
  check(targets > 0, "a training batch without any target");
  ForwardOptions options;
  options.recompute = recipe_.train.recompute == Recompute::kBlock;
  options.on_router = [&](const RouterTrace& t) {
    if (!at::isfinite(t.cutoff).all().item<bool>()) {
      throw NotFinite{"the router's scores of layer " + std::to_string(t.layer)};
    }
    balancer_.observe(moe_index_[t.layer], t.experts, t.scores, t.cutoff);
  };
  if (has_router_loss(recipe_.balance)) {
    options.router_loss = [&](const RouterTrace& t) {
      return balance_loss(recipe_.balance, t.logits, t.experts, t.cu_seqlens, result.tokens);
    };
  }
  if (recipe_.optimizer.qk_clip > 0) {
    options.qk_limit = recipe_.optimizer.qk_clip;
    options.on_max_logit = [&](int64_t layer, const at::Tensor& m) {
      at::Tensor& largest = max_logits_[layer];
      largest = largest.defined() ? at::maximum(largest, m) : m;
    };
  }
  std::vector<at::Tensor> squares;
  double loss_sum = 0;
  for (const data::PackedBatch& batch : batches) {
    const DeviceBatch b = to_device(batch, device_);
    options.on_layer = nullptr;
    if (squares.empty()) {
      options.on_layer = [&](int64_t, const at::Tensor& stream) {
        squares.push_back(stream.to(at::kFloat).square().mean());
      };
    }
    const at::Tensor hidden = forward_hidden(config, weights_, b.packed, nullptr, options);
    const at::Tensor weight =
        at::full({hidden.size(0)}, 1.0 / static_cast<double>(targets), hidden.options().dtype(at::kFloat));
    const at::Tensor loss =
        std::get<0>(ops::linear_cross_entropy(hidden, head_weight(config, weights_), b.targets, weight));
    loss.backward();
    loss_sum += loss.item<double>();
  }
  for (const at::Tensor& square : squares) result.activation_rms.push_back(std::sqrt(square.item<double>()));
  return loss_sum;
}

void TrainStep::clip_logits(StepResult& result) {
  const MlaConfig& m = config_.mla;
  const MlaHeadDims dims{.heads = m.heads, .nope = m.nope_dim, .rope = m.rope_dim, .value = m.v_dim};
  for (int64_t i = 0; i < config_.layers; ++i) {
    if (!max_logits_[i].defined()) continue;
    result.max_logit = std::max(result.max_logit, max_logits_[i].max().item<double>());
    const QkClipFactors factors =
        qk_clip_factors(max_logits_[i].to(at::kCPU), dims, recipe_.optimizer.qk_clip);
    if (factors.clipped == 0) continue;
    result.clipped_heads += factors.clipped;
    const std::string attn = config_.prefix() + "model.layers." + std::to_string(i) + ".self_attn.";
    optimizer_.scale_rows(attn + (m.q_lora_rank > 0 ? "q_b_proj.weight" : "q_proj.weight"), factors.q_rows);
    optimizer_.scale_rows(attn + "kv_b_proj.weight", factors.kv_rows);
  }
}

StepResult TrainStep::run(const ModelConfig& stage_config, const data::PackedLoader& loader, int64_t step,
                          double lr_multiplier) {
  StepResult result;
  max_logits_.assign(config_.layers, {});
  balancer_.begin_step();
  for_each_param(config_, weights_,
                 [](const ParamInfo&, at::Tensor& value) { value.mutable_grad() = at::Tensor(); });
  try {
    const auto batches = micro_batches(loader, step, recipe_.train.micro_batch_tokens);
    result.loss = forward_backward(stage_config, batches, result);
    if (!std::isfinite(result.loss)) throw NotFinite{"the loss"};
  } catch (const NotFinite& fault) {
    result.applied = false;
    result.not_finite = fault.what;
    return result;
  }
  const OptimizerStep done = optimizer_.step(lr_multiplier);
  result.grad_norm = done.grad_norm;
  result.applied = done.applied;
  if (!done.applied) result.not_finite = "the gradient of " + done.not_finite;
  if (!done.applied) return result;
  clip_logits(result);
  result.balance = balancer_.end_step(result.tokens);
  return result;
}

}  // namespace godwit
