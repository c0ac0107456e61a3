// Peak memory of `godwit train`, from the configuration and the shape of a micro-batch: a ledger of what one
// optimiser step holds (docs/plan.md has the list). Nothing is allocated.
//
// Legend: T tokens of a micro-batch, N sequences in it, D model width, E experts, k experts a token, L latent
// width, I width of an expert, V vocabulary; P patches, W, Q, I widths of the vision tower, of its queries
// and inside its blocks.
#pragma once

#include <cstdint>
#include <string>

#include "godwit/model/config.h"

namespace godwit {

// How the operations with kernels of our own run: one kernel that keeps its inputs, or a composition of
// LibTorch's operations that keeps what each of them needs. KDA, the convolutions and the norms keep the same
// either way, or have kernels on every device.
struct FusedOps {
  bool mix = true, glu = true, experts = true, router = true, histogram = true;
};

struct TrainShape {
  int64_t context = 0;       // tokens a sequence
  int64_t micro_tokens = 0;  // T, a multiple of context
  int64_t patches = 0;       // of the pictures of a micro-batch; with them the vision tower runs
  int64_t vectors = 0;       // that they become
  bool accumulate = false;   // more than one micro-batch a step: the gradients of the earlier ones are held
  bool bf16 = false;         // weights, activations and gradients; the optimiser keeps fp32 masters
  bool recompute = false;    // keep the stream between layers only
  bool quantile = true;      // Quantile Balancing keeps a histogram of 1000 bins an expert
  bool cuda = false;         // allocator peak of the device instead of the process's resident set
  FusedOps fused = {};
};

// The kernels that this build has for a device: all on the CPU, on CUDA those that are registered there.
FusedOps fused_ops(bool cuda);

struct TrainMemory {
  double weights = 0, optimizer = 0, balance = 0;
  double gradients = 0, activations = 0, workspace = 0;  // at the moment of the peak
  double allocator = 0;                                  // CPU: what the heap cannot give back or reuse
  double process = 0;                                    // CPU: code and runtime of the program and LibTorch
  const char* moment = "";
  double total() const {
    return weights + optimizer + balance + gradients + activations + workspace + allocator + process;
  }
  double tensors() const { return total() - allocator - process; }
};

TrainMemory forecast_training(const ModelConfig& config, const TrainShape& shape);

// "1.56 GiB (weights 0.17, ...)": one line, for people.
std::string describe(const TrainMemory& memory);

}  // namespace godwit
