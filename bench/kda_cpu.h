// Timing of KDA on the CPU through the public ops, for kda_cpu_bench and the command line.
#pragma once

#include <cstdint>

namespace godwit::bench {

// Random inputs of K = V = width, split into `sequences` of equal length.
struct KdaCpuCase {
  int64_t tokens = 4096, heads = 8, width = 128, sequences = 1;
  double gate_bound = -5.0;  // 0: softplus gate
};

// Milliseconds, the best of the repeats.
struct KdaCpuTimes {
  double forward = 0;           // without autograd
  double forward_backward = 0;  // all gradients
  double recurrence = 0;        // the same forward token by token in ATen (bmm); 0 if not asked for
};
KdaCpuTimes time_kda_cpu(const KdaCpuCase& c, int repeats, bool with_recurrence);

// Milliseconds of kda_step for `sequences` sequences, the best of the repeats.
double time_kda_step_cpu(int64_t sequences, int64_t heads, int64_t width, int repeats);

}  // namespace godwit::bench
