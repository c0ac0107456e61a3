// The optimiser of a run: Muon for matrices and experts, AdamW for the rest, chosen by ParamInfo::role, never
// by shape or name. Masters are fp32 where the weights are bf16; momentum and moments are fp32 (fp64 for fp64
// weights).
//
//   Muon   m <- g + mu m;  u = g + mu m (Nesterov) or m;  O = NewtonSchulz(u) per block;
//          w <- (1 - lr wd) w - lr s O,  s = update_scale * sqrt(max(rows, cols)) of the block.
//   AdamW  m <- b1 m + (1-b1) g;  v <- b2 v + (1-b2) g^2;
//          w <- (1 - lr wd) w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps).
//
// A block is the whole matrix; one expert of kExperts; or, with per_head, the head_rows rows of one attention
// head (arXiv:2607.24653 section 2.5), whose scale then uses the rows of the block. Equal blocks share one
// Newton-Schulz batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "godwit/model/param.h"
#include "godwit/train/recipe.h"
#include "godwit/train/state.h"

namespace godwit {

struct OptimizerParam {
  ParamInfo info;
  at::Tensor value;
  at::Tensor grad;  // undefined: value.grad() is read at every step
};

// How one parameter is treated; for the log and for tests.
struct OptimizerRule {
  std::string name;
  bool muon = false;
  int64_t blocks = 0, rows = 0, cols = 0;  // Muon only
  double scale = 0;                        // Muon only: s above
  double weight_decay = 0;
};

struct OptimizerStep {
  double grad_norm = 0;       // global, before clipping
  std::vector<double> norms;  // of each parameter's gradient in the order of rules(), 0 where it has none
  bool applied = true;        // false: the norm is not finite, or the caller refused; nothing was changed
  std::string not_finite;     // the first parameter with a gradient that is not finite
};

class Optimizer {
 public:
  // batch_elements bounds one Newton-Schulz call on the CPU, four times as many one on a GPU; its workspace
  // is about four times as large.
  Optimizer(const OptimizerOptions& options, std::vector<OptimizerParam> params,
            int64_t batch_elements = int64_t{1} << 24);

  // One step at `lr_multiplier` times the peak rates, unless `accept` refuses the norms. A parameter without
  // a gradient (grad undefined) is left alone. Gradients are only read; clipping scales what is read.
  using Accept = std::function<bool(const OptimizerStep& measured)>;
  OptimizerStep step(double lr_multiplier, const Accept& accept = {});

  // What the following steps read as the gradient of `name`, as OptimizerParam::grad. A parameter that no
  // step moves (the router's bias) is passed over.
  void set_gradient(std::string_view name, const at::Tensor& grad);

  // Multiplies row i of the weight `name` by factors[i], in the master and in the model's copy.
  void scale_rows(std::string_view name, const at::Tensor& factors);

  std::vector<OptimizerRule> rules() const;

  // Everything the next step depends on, beside the weights.
  void for_each_state(const StateVisitor& visit);
  void load_state(const StateMap& saved);

 private:
  struct Slot {
    OptimizerParam param;
    OptimizerRule rule;
    at::Tensor master;                      // undefined where the value itself is the master
    at::Tensor momentum;                    // Muon
    at::Tensor exp_avg, exp_avg_sq, steps;  // AdamW; steps is a 0-d fp32 count, as the fused kernel wants it
    at::Tensor grad;                        // of this step; undefined = none
    bool copied = false;                    // of this step: the value has been set with the master
    at::Tensor& weight() { return master.defined() ? master : param.value; }
  };
  struct Piece {  // blocks [first, first + count) of a slot
    size_t slot = 0;
    int64_t first = 0, count = 0;
  };
  struct Batch {  // one Newton-Schulz call
    int64_t rows = 0, cols = 0;
    bool in_cache = false;  // small fp32 blocks on the CPU: muon.h
    std::vector<Piece> pieces;
  };

  void add_slot(OptimizerParam param);
  void plan_batches(int64_t batch_elements);
  void copy_masters();
  OptimizerStep gather_gradients();
  void muon_step(const Batch& batch, double lr);
  void muon_step_in_cache(const Batch& batch, double lr);
  void muon_step_by_tensors(const Batch& batch, double lr);
  void adamw_step(double weight_decay, double lr);

  OptimizerOptions options_;
  std::vector<Slot> slots_;
  std::map<std::string, size_t, std::less<>> by_name_;
  std::vector<Batch> batches_;
  double grad_scale_ = 1;  // of this step: below 1 where the norm was clipped
};

}  // namespace godwit
