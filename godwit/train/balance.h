// Load balance of the routed experts. The router chooses the top k of score + bias; the rules here move that
// bias (QB, sign) or add a loss (aux_loss). They act once a training step, on the counts of the whole global
// batch, and nowhere else: evaluation, serving and reinforcement learning see a frozen bias.
//
// Quantile Balancing (arXiv:2607.24653 section 2.3.3, App. D), per layer, m tokens, n experts, q = m k / n:
//   r_ij = alpha_i - s_ij,  alpha_i = the (k+1)-th largest of s_i + b     the bias with which token i would
//   go to j b_j <- the value below which q of the r_ij lie, from a histogram of 1000 bins over [min b - 1,
//   max b + 1]; b   <- b - mean(b).  With ema: b <- ema b_old + (1 - ema) b_new before the mean is taken off.
//
// Legend: T tokens, E experts, k experts a token, N documents.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "godwit/train/recipe.h"
#include "godwit/train/state.h"

namespace godwit {

inline constexpr int64_t kQuantileBins = 1000;

// ---- the mathematics
// ----------------------------------------------------------------------------------------

// counts [E, bins] of r over uniform bins of [range_min, range_max]: the r of rank q, linear inside its bin.
// [E] fp64, not centred. The error is at most one bin.
at::Tensor quantile_from_histogram(const at::Tensor& counts, double range_min, double range_max, double q);

// One exact update from all margins, mean-centred: the reference. scores [T, E], bias [E]; returns [E] fp64.
at::Tensor exact_quantile_bias(const at::Tensor& scores, const at::Tensor& bias, int64_t k);

struct LoadStats {
  double max_vio = 0;        // largest load / mean load - 1
  int64_t dead_experts = 0;  // experts without a token
  double entropy = 0;        // of the load, as a share of log E: 1 = uniform
};
LoadStats load_stats(const at::Tensor& load_E);

// The loss terms of `options` for one layer and micro-batch; an undefined tensor when there are none.
// Statistics are those of each document (cu_seqlens int64 [N+1] on the CPU), weighted by its tokens over
// batch_tokens, so that the terms of the micro-batches and ranks of a batch add up. With p = s / sum_j s_j (a
// softmax of log s: no normaliser that small scores could exploit), f_e = E / (k T_d) * tokens of d sent to
// e, P_e = mean over d of p_e:
//   aux_loss                aux_coefficient * sum_e f_e P_e             (DeepSeek-V3, arXiv:2412.19437 eq.
//   17; 1 when even) entropy_regularisation  entropy_regularisation * (log E - H(P))    (0 when even)
// logits [T, E] before the sigmoid, differentiable; experts [T, k].
at::Tensor balance_loss(const BalanceOptions& options, const at::Tensor& logits, const at::Tensor& experts,
                        const at::Tensor& cu_seqlens, int64_t batch_tokens);

// ---- the rule over a run
// ------------------------------------------------------------------------------------

struct LayerBalance {
  LoadStats batch;              // this step's global batch
  double windowed_max_vio = 0;  // of the load averaged over about `window` steps
  int64_t windowed_dead = 0;    // experts without a token for `window` steps
  double windowed_entropy = 1;  // of the same load as windowed_max_vio
  double flip_rate = 0;         // share of the probe tokens' k choices that differ under the new bias
};

struct BalanceReport {
  std::vector<LayerBalance> layers;
  std::vector<std::string> alarms;  // conditions that have lasted for alarm_steps, one line each
  bool remind = false;              // some of them since a multiple of alarm_steps: time to log them (again)
  double max_vio() const;           // largest over the layers
  int64_t dead_experts() const;     // largest over the layers
};

class Balancer {
 public:
  // Sums tensors in place over the ranks that hold other tokens (data ranks): called once a step for all
  // statistics.
  using Reduce = std::function<void(const std::vector<at::Tensor>&)>;

  explicit Balancer(const BalanceOptions& options) : options_(options) {}

  // `bias` [E] fp32 is the model's own tensor and is written in place. Layers are numbered in the order of
  // the calls.
  void add_layer(const std::string& name, const at::Tensor& bias, int64_t k);
  size_t layers() const { return layers_.size(); }
  // Load of each layer's experts [E] fp64, averaged over about `window` steps.
  std::vector<at::Tensor> recent_loads() const;

  // Forgets what was observed and takes the histogram ranges from the current biases. A step that is thrown
  // away ends with the next begin_step.
  void begin_step();

  // One layer's routing of one micro-batch, as ops::moe_router took and returned it. Once a token: not again
  // when the backward pass recomputes the forward.
  void observe(size_t layer, const at::Tensor& experts, const at::Tensor& logits, const at::Tensor& cutoff);

  // Reduces, reports, moves the biases. batch_tokens: tokens of the global batch; a layer that saw another
  // number (counted twice by a recomputed forward, or summed over replicas) throws.
  BalanceReport end_step(int64_t batch_tokens, const Reduce& reduce = {});

  // Beside the biases, which are weights: the windowed loads and the alarm counters.
  void for_each_state(const StateVisitor& visit);
  void load_state(const StateMap& saved);

 private:
  struct Layer {
    std::string name;
    at::Tensor bias;
    int64_t k = 0;
    double range_min = 0, range_max = 0;
    at::Tensor counts;  // [E, kQuantileBins] int64
    at::Tensor load;    // [E] int64
    at::Tensor probe;   // [P, E] scores of the step's first tokens
    at::Tensor recent;  // [E] fp64 load, decayed by 1 - 1/window a step
    at::Tensor idle;    // [E] int64 steps since the last token
    at::Tensor alarm;   // [3] int64 steps in a row beyond the limits: MaxVio, dead experts, entropy
    int64_t experts() const { return bias.size(0); }
  };

  void update_bias(Layer& layer, int64_t batch_tokens);
  LayerBalance measure(Layer& layer);
  void raise_alarms(Layer& layer, const LayerBalance& balance, BalanceReport& report) const;

  BalanceOptions options_;
  std::vector<Layer> layers_;
};

}  // namespace godwit
