#include "godwit/train/optimizer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <limits>
#include <set>
#include <tuple>

#include "godwit/base/check.h"
#include "godwit/ops/ops.h"
#include "godwit/train/muon.h"

namespace godwit {
namespace {

constexpr int64_t kGpuBatches = 4;  // a GPU wants more blocks at once: several waves of tiles

bool uses_muon(ParamRole role) {
  return role == ParamRole::kMatrix || role == ParamRole::kExperts;
}

OptimizerRule make_rule(const OptimizerOptions& o, const ParamInfo& info, const at::Tensor& value) {
  OptimizerRule rule{.name = info.name, .muon = uses_muon(info.role)};
  rule.weight_decay = info.weight_decay ? o.weight_decay : 0.0;
  if (!rule.muon) return rule;
  if (info.role == ParamRole::kExperts) {
    check(value.dim() == 3, "optimizer: {}: experts are [E, out, in], got {} dimensions", info.name,
          value.dim());
    rule.blocks = value.size(0);
    rule.rows = value.size(1);
  } else {
    check(value.dim() == 2, "optimizer: {}: a matrix is [out, in], got {} dimensions", info.name,
          value.dim());
    const bool split = o.per_head && info.head_rows > 0;
    rule.rows = split ? info.head_rows : value.size(0);
    check(rule.rows == 0 || value.size(0) % rule.rows == 0,
          "optimizer: {}: {} rows are not whole heads of {}", info.name, value.size(0), rule.rows);
    rule.blocks = rule.rows > 0 ? value.size(0) / rule.rows : 0;
  }
  rule.cols = value.size(-1);
  rule.scale = o.update_scale * std::sqrt(static_cast<double>(std::max(rule.rows, rule.cols)));
  return rule;
}

}  // namespace

Optimizer::Optimizer(const OptimizerOptions& options, std::vector<OptimizerParam> params,
                     int64_t batch_elements)
    : options_(options) {
  at::NoGradGuard no_grad;
  for (OptimizerParam& param : params)
    if (param.info.role != ParamRole::kRouterBias)
      add_slot(std::move(param));  // set by the balance rule alone
  plan_batches(batch_elements);
}

void Optimizer::add_slot(OptimizerParam param) {
  const at::Tensor& value = param.value;
  check(value.is_contiguous(), "optimizer: {}: the weight is not contiguous", param.info.name);
  check(by_name_.emplace(param.info.name, slots_.size()).second, "optimizer: two parameters are called {}",
        param.info.name);
  Slot slot;
  slot.param = param;
  slot.rule = make_rule(options_, param.info, value);
  const bool wide = value.scalar_type() == at::kFloat || value.scalar_type() == at::kDouble;
  if (!wide) slot.master = value.to(at::kFloat);
  const at::Tensor zeros = at::zeros_like(slot.weight());
  if (slot.rule.muon) {
    slot.momentum = zeros;
  } else {
    slot.exp_avg = zeros;
    slot.exp_avg_sq = at::zeros_like(zeros);
    slot.steps = at::zeros({}, zeros.options().dtype(at::kFloat));
  }
  slots_.push_back(std::move(slot));
}

void Optimizer::plan_batches(int64_t batch_elements) {
  // A batch still open for blocks of one shape, dtype and device.
  std::map<std::tuple<int64_t, int64_t, at::ScalarType, std::string>, size_t> open;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const OptimizerRule& rule = slots_[i].rule;
    if (!rule.muon || slots_[i].momentum.numel() == 0) continue;
    const at::Tensor& momentum = slots_[i].momentum;
    const bool in_cache = momentum.is_cpu() && momentum.scalar_type() == at::kFloat &&
                          muon_fits_cache(rule.rows, rule.cols);  // no workspace, so no bound
    const int64_t bound = momentum.is_cuda() ? kGpuBatches * batch_elements : batch_elements;
    const int64_t most = in_cache ? std::numeric_limits<int64_t>::max()
                                  : std::max<int64_t>(1, bound / (rule.rows * rule.cols));
    const auto key = std::make_tuple(rule.rows, rule.cols, momentum.scalar_type(), momentum.device().str());
    for (int64_t first = 0; first < rule.blocks;) {
      const auto found = open.find(key);
      int64_t used = most;
      if (found != open.end()) {
        used = 0;
        for (const Piece& piece : batches_[found->second].pieces) used += piece.count;
      }
      if (used == most) {
        open[key] = batches_.size();
        batches_.push_back({.rows = rule.rows, .cols = rule.cols, .in_cache = in_cache, .pieces = {}});
        used = 0;
      }
      const int64_t count = std::min(most - used, rule.blocks - first);
      batches_[open[key]].pieces.push_back({.slot = i, .first = first, .count = count});
      first += count;
    }
  }
}

// Reads the gradients, finds the global norm and the factor that clips it.
OptimizerStep Optimizer::gather_gradients() {
  std::vector<at::Tensor> grads;
  std::vector<size_t> owners;
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    slot.grad = slot.param.grad.defined() ? slot.param.grad : slot.param.value.grad();
    if (!slot.grad.defined()) continue;
    check(slot.grad.sizes() == slot.param.value.sizes(), "optimizer: {}: the gradient has another shape",
          slot.param.info.name);
    if (slot.grad.numel() == 0) continue;
    grads.push_back(slot.grad);
    owners.push_back(i);
  }
  OptimizerStep out;
  out.norms.assign(slots_.size(), 0.0);
  if (grads.empty()) return out;
  std::vector<at::Tensor> norms = at::_foreach_norm(grads, 2);
  for (at::Tensor& norm : norms) norm = norm.to(at::kDouble);
  const at::Tensor all = at::stack(norms).to(at::kCPU);
  out.grad_norm = all.norm().item<double>();
  const auto* values = all.const_data_ptr<double>();
  for (size_t i = 0; i < owners.size(); ++i) out.norms[owners[i]] = values[i];
  if (!std::isfinite(out.grad_norm)) {
    size_t i = 0;
    while (i + 1 < owners.size() && std::isfinite(values[i])) ++i;
    out.applied = false;
    out.not_finite = slots_[owners[i]].param.info.name;
    return out;
  }
  const bool clips = options_.grad_clip > 0 && out.grad_norm > options_.grad_clip;
  grad_scale_ = clips ? options_.grad_clip / out.grad_norm : 1.0;
  return out;
}

void Optimizer::set_gradient(std::string_view name, const at::Tensor& grad) {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) return;
  slots_[found->second].param.grad = grad;
  slots_[found->second].grad.reset();
}

OptimizerStep Optimizer::step(double lr_multiplier, const Accept& accept) {
  at::NoGradGuard no_grad;
  OptimizerStep out = gather_gradients();
  if (out.applied && accept && !accept(out)) out.applied = false;
  if (!out.applied) return out;
  for (const Batch& batch : batches_) muon_step(batch, options_.muon_lr * lr_multiplier);
  std::set<double> decays;
  for (const Slot& slot : slots_)
    if (!slot.rule.muon) decays.insert(slot.rule.weight_decay);
  for (const double decay : decays) adamw_step(decay, options_.adamw_lr * lr_multiplier);
  copy_masters();
  return out;
}

void Optimizer::copy_masters() {
  for (Slot& slot : slots_) {
    if (slot.grad.defined() && slot.master.defined() && !slot.copied) slot.param.value.copy_(slot.master);
    slot.copied = false;
    slot.grad.reset();
  }
}

void Optimizer::muon_step(const Batch& batch, double lr) {
  if (batch.in_cache)
    muon_step_in_cache(batch, lr);
  else
    muon_step_by_tensors(batch, lr);
}

void Optimizer::muon_step_in_cache(const Batch& batch, double lr) {
  MuonBlocks p{.blocks = {}, .rows = batch.rows, .cols = batch.cols};
  p.grad_scale = static_cast<float>(grad_scale_);
  p.momentum = static_cast<float>(options_.momentum);
  p.nesterov = options_.nesterov;
  p.ns_steps = options_.ns_steps;
  std::vector<at::Tensor> grads;  // keeps converted gradients alive
  for (const Piece& piece : batch.pieces) {
    Slot& slot = slots_[piece.slot];
    if (!slot.grad.defined()) continue;
    grads.push_back(slot.grad.to(at::kFloat).contiguous());
    const int64_t n = batch.rows * batch.cols;
    for (int64_t i = piece.first; i < piece.first + piece.count; ++i)
      p.blocks.push_back({.weight = slot.weight().mutable_data_ptr<float>() + i * n,
                          .momentum = slot.momentum.mutable_data_ptr<float>() + i * n,
                          .grad = grads.back().const_data_ptr<float>() + i * n,
                          .keep = static_cast<float>(1 - lr * slot.rule.weight_decay),
                          .rate = static_cast<float>(lr * slot.rule.scale)});
  }
  muon_step_cpu(p);
}

void Optimizer::muon_step_by_tensors(const Batch& batch, double lr) {
  const auto blocks_of = [&](const at::Tensor& tensor, const Piece& piece) {
    return tensor.view({-1, batch.rows, batch.cols}).narrow(0, piece.first, piece.count);
  };
  int64_t total = 0;
  for (const Piece& piece : batch.pieces)
    if (slots_[piece.slot].grad.defined()) total += piece.count;
  if (total == 0) return;
  const at::Tensor& state = slots_[batch.pieces[0].slot].momentum;
  const bool gpu_fp32 =
      state.is_cuda() && state.scalar_type() == at::kFloat;  // ops::newton_schulz_ uses bf16
  at::Tensor update = at::empty({total, batch.rows, batch.cols},
                                state.options().dtype(gpu_fp32 ? at::kBFloat16 : state.scalar_type()));
  int64_t at = 0;
  for (const Piece& piece : batch.pieces) {
    const Slot& slot = slots_[piece.slot];
    if (!slot.grad.defined()) continue;
    at::Tensor momentum = blocks_of(slot.momentum, piece), u = update.narrow(0, at, piece.count);
    ops::muon_momentum_(momentum, blocks_of(slot.grad.contiguous(), piece), u, grad_scale_, options_.momentum,
                        options_.nesterov);
    at += piece.count;
  }
  ops::newton_schulz_(update, options_.ns_steps);
  at = 0;
  for (const Piece& piece : batch.pieces) {
    Slot& slot = slots_[piece.slot];
    if (!slot.grad.defined()) continue;
    at::Tensor weight = blocks_of(slot.weight(), piece);
    std::optional<at::Tensor> copy;
    if (slot.master.defined()) copy = blocks_of(slot.param.value, piece);
    ops::muon_weight_(weight, update.narrow(0, at, piece.count), copy, 1 - lr * slot.rule.weight_decay,
                      lr * slot.rule.scale);
    slot.copied = true;
    at += piece.count;
  }
}

void Optimizer::adamw_step(double weight_decay, double lr) {
  // The fused kernel wants every list on one device and of one dtype.
  struct Lists {
    std::vector<at::Tensor> weights, grads, exp_avgs, exp_avg_sqs, steps;
  };
  std::map<std::pair<std::string, at::ScalarType>, Lists> groups;
  for (Slot& slot : slots_) {
    if (slot.rule.muon || slot.rule.weight_decay != weight_decay || !slot.grad.defined()) continue;
    at::Tensor& weight = slot.weight();
    Lists& lists = groups[{weight.device().str(), weight.scalar_type()}];
    lists.weights.push_back(weight);
    const at::Tensor grad = slot.grad.to(weight.scalar_type()).contiguous();
    lists.grads.push_back(grad_scale_ == 1.0 ? grad : grad * grad_scale_);
    lists.exp_avgs.push_back(slot.exp_avg);
    lists.exp_avg_sqs.push_back(slot.exp_avg_sq);
    lists.steps.push_back(slot.steps);
  }
  for (auto& [key, lists] : groups) {
    at::_foreach_add_(lists.steps, 1);
    at::_fused_adamw_(lists.weights, lists.grads, lists.exp_avgs, lists.exp_avg_sqs, /*max_exp_avg_sqs=*/{},
                      lists.steps, lr, options_.beta1, options_.beta2, weight_decay, options_.eps,
                      /*amsgrad=*/false, /*maximize=*/false);
  }
}

void Optimizer::scale_rows(std::string_view name, const at::Tensor& factors) {
  at::NoGradGuard no_grad;
  const auto found = by_name_.find(name);
  check(found != by_name_.end(), "optimizer: there is no parameter {}", name);
  Slot& slot = slots_[found->second];
  at::Tensor& weight = slot.weight();
  check(factors.dim() == 1 && factors.size(0) == weight.size(0),
        "optimizer: {}: expected {} row factors, got {}", name, weight.size(0), factors.numel());
  weight.mul_(factors.to(weight.options()).unsqueeze(1));
  if (slot.master.defined()) slot.param.value.copy_(slot.master);
}

std::vector<OptimizerRule> Optimizer::rules() const {
  std::vector<OptimizerRule> out;
  for (const Slot& slot : slots_) out.push_back(slot.rule);
  return out;
}

void Optimizer::for_each_state(const StateVisitor& visit) {
  for (Slot& slot : slots_) {
    const std::string& name = slot.param.info.name;
    if (slot.master.defined()) visit(name + ".master", slot.master);
    if (slot.rule.muon) {
      visit(name + ".momentum", slot.momentum);
    } else {
      visit(name + ".exp_avg", slot.exp_avg);
      visit(name + ".exp_avg_sq", slot.exp_avg_sq);
      visit(name + ".step", slot.steps);
    }
  }
}

void Optimizer::load_state(const StateMap& saved) {
  at::NoGradGuard no_grad;
  load_state_strict(
      "optimizer", [&](const StateVisitor& visit) { for_each_state(visit); }, saved);
}

}  // namespace godwit
