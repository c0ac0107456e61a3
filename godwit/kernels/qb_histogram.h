// Quantile Balancing statistics (Kimi K3 technical report, Appendix D): histogram of the required bias
// r = cutoff_t - scores_te for each expert e over uniform bins of [range_min, range_max]; values outside
// count in the end bins. counts [E, B] is added to. scores [T, E], or from_logits the logits whose sigmoid
// they are; cutoff [T].
#pragma once

#include <cstdint>

namespace godwit::kernels {

struct Histogram {
  int64_t tokens = 0;
  int64_t experts = 0;
  int64_t bins = 0;
  float range_min = 0;
  float bins_per_unit = 0;
  const float* scores = nullptr;
  bool from_logits = false;
  const float* cutoff = nullptr;
  int64_t* counts = nullptr;
};
void qb_histogram(const Histogram& args);

}  // namespace godwit::kernels
