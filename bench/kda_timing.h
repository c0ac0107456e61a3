// Timing of KDA through the public ops, for kda_cpu_bench and `godwit bench kda`: fp32 on the CPU, bf16 on a
// GPU.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace godwit::bench {

// Random inputs of K = V = width, split into `sequences` of equal length.
struct KdaTimingCase {
  int64_t tokens = 4096, heads = 8, width = 128, sequences = 1;
  double gate_bound = -5.0;  // 0: softplus gate
  c10::Device device = c10::kCPU;
};

// Milliseconds, the best of the repeats.
struct KdaTimes {
  double forward = 0;           // without autograd
  double forward_backward = 0;  // all gradients
  double recurrence = 0;        // the same forward token by token in ATen (bmm); 0 if not asked for
};
KdaTimes time_kda(const KdaTimingCase& c, int repeats, bool with_recurrence);

// Milliseconds of kda_step for c.sequences sequences, the best of the repeats.
double time_kda_step(const KdaTimingCase& c, int repeats);

// Bytes a second, read and written, of copying a large tensor.
double copy_bandwidth(c10::Device device);

}  // namespace godwit::bench
