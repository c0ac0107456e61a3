// The parts of attn_res_mix that are compiled for each instruction set.
#pragma once

#include "godwit/kernels/attn_res_mix.h"

namespace godwit::kernels {

#define GODWIT_DECLARE(isa)                                                                              \
  namespace isa {                                                                                        \
  void mix_fwd_range(const MixForward& args, int64_t begin, int64_t end, float* scratch);                \
  /* d_key [D]: the sum over tokens [begin, end), written. */                                            \
  void mix_bwd_range(const MixBackward& args, int64_t begin, int64_t end, float* d_key, float* scratch); \
  }
GODWIT_DECLARE(avx2)
GODWIT_DECLARE(avx512)
#undef GODWIT_DECLARE

}  // namespace godwit::kernels
