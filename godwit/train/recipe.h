// A recipe: the whole training run in one file. docs/training.md lists every key. No LibTorch here.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "godwit/train/fields.h"

namespace godwit {

struct ModelOptions {
  std::string name;                  // preset, directory or config.json; empty when `init` names the model
  std::string override_json = "{}";  // configuration keys laid over it, a JSON object
  bool operator==(const ModelOptions&) const = default;
};

struct DatasetOptions {
  std::string name;   // for a stage's mix; default: the last part of `path`
  std::string path;   // a directory of `godwit data pack`
  double weight = 1;  // share of the tokens, relative to the other datasets
  bool operator==(const DatasetOptions&) const = default;
};

struct OptimizerOptions {
  double muon_lr = 2e-3;   // peak, matrices and experts
  double adamw_lr = 2e-3;  // peak, everything else
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double weight_decay = 0.1;  // decoupled: w -= lr * weight_decay * w
  double grad_clip = 1.0;     // largest global norm; 0 = off
  double momentum = 0.95;     // Muon
  bool nesterov = true;
  int64_t ns_steps = 5;
  double update_scale = 0.2;  // Muon's update is multiplied by update_scale * sqrt(max(rows, cols))
  bool per_head = true;       // attention q, k, v: each head's rows are a matrix of their own
  double qk_clip = 100;       // largest attention logit per head; 0 = off
  bool operator==(const OptimizerOptions&) const = default;
};

struct ScheduleOptions {
  double warmup = 0.01;       // share of the run, linear
  double min_lr_ratio = 0.1;  // the cosine ends at this share of the peak
  bool operator==(const ScheduleOptions&) const = default;
};

enum class BalanceMethod { kQuantile, kSign, kAuxLoss, kNone };

struct BalanceOptions {
  BalanceMethod method = BalanceMethod::kQuantile;
  double sign_rate = 1e-3;
  double aux_coefficient = 1e-3;
  double ema = 0;                     // share of the old bias kept at a quantile update; 0 = off
  double entropy_regularisation = 0;  // coefficient; 0 = off
  int64_t window = 32;                // steps of the windowed load statistics
  double alarm_max_vio = 10;       // windowed MaxVio of any layer above this for alarm_steps: warn; 0 = off
  double alarm_dead_share = 0.25;  // the same for the share of experts without a token in the window; 0 = off
  double alarm_entropy =
      0.5;  // the same for the entropy of the windowed load, as a share of its largest value; 0 = off
  int64_t alarm_steps = 20;
  bool operator==(const BalanceOptions&) const = default;
};

struct StageOptions {
  std::string name;
  int64_t context = 0;                // tokens a row
  int64_t batch_tokens = 0;           // tokens a step over all devices, a multiple of context
  int64_t steps = 0;                  // resolved from `tokens` where the file gives those
  std::map<std::string, double> mix;  // dataset name -> weight; empty = the datasets' own weights
  double rope_base = 0;               // MLA rotation base; 0 = none
  int64_t window = 0;                 // attention window in tokens; 0 = none
  double gate = std::numeric_limits<double>::infinity();  // nats; the stage stops the run when the held-out
                                                          // loss at the stage before's context rises by more
  double time_share = 0;  // share of train.minutes; 0 = the stage's share of the tokens
  bool operator==(const StageOptions&) const = default;
};

struct CheckpointOptions {
  int64_t every = 0;  // steps; 0 = only at the end
  int64_t keep = 2;   // newest kept; 0 = all
  bool operator==(const CheckpointOptions&) const = default;
};

struct EvalOptions {
  int64_t every = 0;              // steps; 0 = only at the ends of stages
  int64_t tokens = 65536;         // held-out tokens an evaluation
  int64_t context = 0;            // 0 = the stage's
  std::vector<std::string> data;  // held-out datasets
  bool operator==(const EvalOptions&) const = default;
};

enum class Recompute { kNone, kBlock };
enum class TrainDtype { kF32, kBf16 };
enum class FaultPolicy { kStop, kSkip, kRollBack };

struct TrainOptions {
  TrainDtype dtype = TrainDtype::kF32;  // of weights and activations; the optimiser keeps fp32 masters
  Recompute recompute = Recompute::kNone;
  int64_t micro_batch_tokens = 0;               // 0 = the whole batch at once
  FaultPolicy nan_policy = FaultPolicy::kStop;  // a loss or gradient that is not finite
  FaultPolicy spike_policy =
      FaultPolicy::kSkip;  // a loss more than spike_nats above the mean of the last 20 steps
  double spike_nats = 0;   // 0 = off
  int64_t fault_limit =
      10;              // stop after so many skipped steps in a row, or so many returns to one checkpoint
  double minutes = 0;  // fit the schedule into this time; 0 = off, the run is a pure function of its seed
  double time_limit_s = 0;  // checkpoint and stop after this long; never changes the schedule; 0 = off
  bool tensorboard = true;
  bool operator==(const TrainOptions&) const = default;
};

struct DistOptions {
  double timeout_s = 60;  // a rank that died or hangs is noticed within this time
  bool operator==(const DistOptions&) const = default;
};

struct Recipe {
  std::string out;        // run directory
  std::string init;       // model directory to start from
  std::string tokenizer;  // empty = the model's
  int64_t seed = 0;
  ModelOptions model;
  std::vector<DatasetOptions> data;
  OptimizerOptions optimizer;
  ScheduleOptions schedule;
  BalanceOptions balance;
  std::vector<StageOptions> stages;
  CheckpointOptions checkpoint;
  EvalOptions eval;
  TrainOptions train;
  DistOptions dist;
  bool operator==(const Recipe&) const = default;
};

// The parts, for recipes of other kinds of run.
void visit(Fields& f, ModelOptions& o);
void visit(Fields& f, OptimizerOptions& o);
void visit(Fields& f, ScheduleOptions& o);
void visit(Fields& f, BalanceOptions& o);
void visit(Fields& f, CheckpointOptions& o);
void visit(Fields& f, TrainOptions& o);
void visit(Fields& f, DistOptions& o);
void visit(Fields& f, Recipe& recipe);

// Throws Error naming file, line and key.
Recipe load_recipe(const std::string& path, const std::vector<std::string>& overrides = {});
Recipe parse_recipe(std::string_view text, const std::string& name,
                    const std::vector<std::string>& overrides = {});

// The resolved recipe; load_recipe reads it back to an equal one.
std::string to_toml(const Recipe& recipe);

}  // namespace godwit
