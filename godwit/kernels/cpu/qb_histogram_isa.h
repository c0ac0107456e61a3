// The part of qb_histogram that is compiled for each instruction set.
#pragma once

#include "godwit/kernels/qb_histogram.h"

namespace godwit::kernels {

inline constexpr int64_t kHistogramExperts = 32;  // experts counted together

#define GODWIT_DECLARE(isa)                                                                         \
  namespace isa {                                                                                   \
  /* Experts [first, first + up to kHistogramExperts); local: kHistogramExperts * bins counters. */ \
  void histogram_experts(const Histogram& args, int64_t first, int32_t* local);                     \
  }
GODWIT_DECLARE(avx2)
GODWIT_DECLARE(avx512)
#undef GODWIT_DECLARE

}  // namespace godwit::kernels
