// One optimiser step: micro-batches forward and backward, clipping, Muon and AdamW, QK-Clip, expert balance.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "godwit/data/loader.h"
#include "godwit/model/forward.h"
#include "godwit/train/balance.h"
#include "godwit/train/optimizer.h"
#include "godwit/train/recipe.h"

namespace godwit {

struct StepResult {
  double loss = 0;  // nats a token, mean over the batch's targets
  double grad_norm = 0;
  int64_t tokens = 0;
  bool applied = true;     // false: not finite, nothing changed
  std::string not_finite;  // what was not finite first, for a message
  BalanceReport balance;
  double max_logit = 0;  // largest attention logit (or its bound, where that is below the limit)
  int64_t clipped_heads = 0;
  std::vector<double> activation_rms;  // of the residual stream after each layer, first micro-batch
};

class TrainStep {
 public:
  TrainStep(const Recipe& recipe, const ModelConfig& config, ModelWeights& weights, at::Device device);

  // Step `step` of a stage (counted inside it).
  StepResult run(const ModelConfig& stage_config, const data::PackedLoader& loader, int64_t step,
                 double lr_multiplier);

  Optimizer& optimizer() { return optimizer_; }
  Balancer& balancer() { return balancer_; }

 private:
  double forward_backward(const ModelConfig& config, const std::vector<data::PackedBatch>& micro_batches,
                          StepResult& result);
  void clip_logits(StepResult& result);

  const Recipe& recipe_;
  const ModelConfig& config_;
  ModelWeights& weights_;
  at::Device device_;
  Optimizer optimizer_;
  Balancer balancer_;
  std::vector<int64_t> moe_index_;      // [layers] balancer's layer, -1 for dense
  std::vector<at::Tensor> max_logits_;  // [layers] of this step, undefined for KDA
};

}  // namespace godwit
