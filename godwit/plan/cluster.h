// Training on a cluster: memory a GPU, communication, time and cost of a layout, from the configuration
// alone. The formulas, one by one: docs/plan.md.
//
// Legend: tensor (TP), pipeline (PP), context (CP), expert (EP) and data (DP) parallel ranks. GPUs = TP PP CP
// DP; the experts of a pipeline stage are spread over EP of its GPUs / PP, and copied to the others.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "godwit/model/config.h"

namespace godwit {

// Defaults: NVIDIA H200 in hosts of eight. Bandwidths are of one direction.
struct Gpu {
  double memory_bytes = 139.0 * (1 << 30);  // what a process can take of the 141 GB
  double bandwidth = 4.8e12;                // memory, bytes/s
  double flops = 989e12;                    // dense bf16
  double link = 350e9;                      // to the GPUs of the same host, bytes/s (measured of 450)
  double network = 50e9;                    // to other hosts, bytes/s (one 400 Gb/s card a GPU)
  int64_t per_host = 8;
};

struct Layout {
  int64_t tp = 1, pp = 1, cp = 1, ep = 1, dp = 1;
  int64_t gpus() const { return tp * pp * cp * dp; }
  std::string text() const;  // "TP 8, PP 8, CP 1, EP 32, DP 16"
};

struct ClusterOptions {
  int64_t gpus = 1;
  int64_t tp = 0, pp = 0, cp = 0, ep = 0, dp = 0;  // 0: chosen
  Gpu gpu;
  int64_t context = 8192;    // tokens a sequence; a micro-batch is one sequence
  int64_t batch_tokens = 0;  // tokens a step over all GPUs; 0: 4 PP sequences a data rank (1 where PP is 1)
  bool recompute = true;     // keep a layer's inputs only, and run it again in the backward
  int64_t tokens = 0;        // of the whole training; 0: no total
  double mfu = 0.35;         // of the peak, wall clock: communication and pipeline bubbles included
  double price = 3.0;        // a GPU-hour
};

// Bytes on the fullest GPU, at the moment of its peak.
struct GpuMemory {
  double weights = 0;    // bf16 (decay, convolution and router bias fp32)
  double gradients = 0;  // in the weights' dtype
  double optimizer = 0;  // fp32 master and moments, split over the ranks that hold the same weights (ZeRO-1)
  double activations = 0;  // kept for the backward, of all micro-batches in flight
  double workspace = 0;    // the layer at work: its activations and their gradients; logits
  double system = 0;       // CUDA context and NCCL's buffers
  double total() const { return weights + gradients + optimizer + activations + workspace + system; }
};

enum class Traffic { kTensor, kExpert, kContext, kPipeline, kData };
inline constexpr std::array<const char*, 5> kTrafficNames = {"tensor", "expert", "context", "pipeline",
                                                             "data"};

struct ClusterPlan {
  Layout layout;
  GpuMemory memory;
  int64_t fullest_stage = 0;
  std::array<double, 5> sent_bytes{};    // by Traffic: sent by one GPU in one step
  std::array<double, 5> sent_seconds{};  // at the bandwidth of the links they take
  int64_t batch_tokens = 0, micro_batches = 0;
  double bubble = 0;  // share of the step that a pipeline stage waits
  double step_flops = 0;
  double step_time_s = 0;  // at the stated MFU, or the communication if that alone takes longer
  bool communication_bound = false;
  double communication_s() const;
  // Of options.tokens; 0 without.
  int64_t steps = 0;
  double seconds = 0, gpu_hours = 0, cost = 0;
};

// Axes that are 0 are chosen: those of the smallest cluster that holds the model, with data parallel ranks on
// top, or where that does not divide `gpus` the layout that communicates least. Throws Error when an axis is
// impossible, and when the layout does not fit, naming the nearest that does.
ClusterPlan plan_cluster(const ModelConfig& config, const ClusterOptions& options);

}  // namespace godwit
