// The parts of mla_decode that are compiled for each instruction set; dispatch/mla_decode.cpp spreads them
// over the threads.
#pragma once

#include "godwit/kernels/mla_decode.h"

namespace godwit::kernels {

// Rows [begin, end) of one sequence for heads [head, head_end).
struct MlaPart {
  int64_t sequence = 0;
  int64_t begin = 0, end = 0;
  int64_t head = 0, head_end = 0;
  // Results of all heads: the largest score and the sum of exp(score - largest) [H, 2], and the values
  // weighted by exp(score - largest) [H, rank].
  float* statistics = nullptr;
  float* values = nullptr;
};

#define GODWIT_DECLARE(isa)                                                                                 \
  namespace isa {                                                                                           \
  void mla_decode_part(const MlaDecode& args, const MlaPart& part);                                         \
  /* One head's result from its parts, whose statistics lie `heads` * 2 apart and values `heads` * rank. */ \
  void mla_decode_merge(const MlaDecode& args, int64_t parts, const float* statistics, const float* values, \
                        float* o);                                                                          \
  }
GODWIT_DECLARE(avx2)
GODWIT_DECLARE(avx512)
#undef GODWIT_DECLARE

}  // namespace godwit::kernels
