// One optimiser step: micro-batches forward and backward, the sum over the ranks, clipping, Muon and AdamW,
// QK-Clip, expert balance. All ranks of the group make it together, each with its share of the sequences, and
// end with the same weights.
#pragma once

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "godwit/data/loader.h"
#include "godwit/dist/group.h"
#include "godwit/model/forward.h"
#include "godwit/train/balance.h"
#include "godwit/train/optimizer.h"
#include "godwit/train/recipe.h"

namespace godwit {

enum class StepFault { kNone, kNotFinite, kSpike };

// Where the wall time of a step went, by the waits for the device that the step makes anyway.
struct StepSeconds {
  double data = 0;       // sequences read and packed
  double passes = 0;     // forward and backward
  double sum = 0;        // gradients over the ranks
  double optimizer = 0;  // norms, clipping, Muon, AdamW, QK-Clip
  double balance = 0;    // the routers' biases
};

struct StepResult {
  StepSeconds seconds;
  double loss = 0;  // nats a token, mean over the global batch's targets
  double grad_norm = 0;
  int64_t tokens = 0;                  // of the global batch
  StepFault fault = StepFault::kNone;  // any other: nothing changed
  std::string what;                    // the fault in words: which layer, which tensor
  BalanceReport balance;
  double max_logit = 0;  // largest attention logit (or its bound, where that is below the limit)
  int64_t clipped_heads = 0;
  std::vector<double>
      activation_rms;  // of the residual stream after each layer, this rank's first micro-batch
  std::vector<double> layer_grad_norms;  // of each decoder layer's parameters, before clipping
  double vision_grad_norm = 0;           // of the tower and projector; 0 without pictures
};

struct StepInput {
  const ModelConfig& config;  // the stage's
  const data::PackedLoader& loader;
  int64_t batch = 0;  // of the stage
  double lr_multiplier = 1;
  double expected_loss = 0,
         spike_nats = std::numeric_limits<double>::infinity();  // a loss above their sum is a spike
};

class TrainStep {
 public:
  TrainStep(const Recipe& recipe, const ModelConfig& config, ModelWeights& weights, at::Device device,
            dist::Group& group);

  StepResult run(const StepInput& input);

  // Of the last step, summed over the ranks, by the names of for_each_param; undefined where there is none.
  std::vector<std::pair<std::string, at::Tensor>> gradients() const;
  Optimizer& optimizer() { return optimizer_; }
  Balancer& balancer() { return balancer_; }

 private:
  using MicroBatches = std::vector<data::PackedBatch>;
  struct Param {
    std::string name;
    at::Tensor value, grad;
  };
  ForwardOptions forward_options(int64_t batch_tokens);
  double forward_backward(const ModelConfig& config, const MicroBatches& batches, StepResult& result);
  void collect_gradients(bool more);
  void sum_gradients(double& loss);
  std::string first_not_finite(const ModelConfig& config, const MicroBatches& batches);
  std::string largest_change(const std::vector<double>& norms) const;
  void remember_norms(const std::vector<double>& norms);
  void apply(const StepInput& input, StepResult& result);
  void clip_logits(StepResult& result);

  const Recipe& recipe_;
  const ModelConfig& config_;
  ModelWeights& weights_;
  at::Device device_;
  dist::Group& group_;
  std::vector<Param> params_;  // in the order of for_each_param
  Optimizer optimizer_;
  Balancer balancer_;
  std::vector<int64_t> moe_index_;      // [layers] balancer's layer, -1 for dense
  std::vector<at::Tensor> max_logits_;  // [layers] of this step, undefined for KDA
  std::vector<double> usual_norms_;     // of each parameter's gradient, a running mean; for messages only
};

}  // namespace godwit
