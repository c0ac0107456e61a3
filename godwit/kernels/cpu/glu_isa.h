// The parts of glu that are compiled for each instruction set.
#pragma once

#include "godwit/kernels/glu.h"

namespace godwit::kernels {

#define GODWIT_DECLARE(isa)                                                                              \
  namespace isa {                                                                                        \
  void glu_fwd_range(int64_t n, const float* g, const float* u, GluForm form, float* out);               \
  void glu_bwd_range(int64_t n, const float* d_out, const float* g, const float* u, GluForm form,        \
                     float* d_g, float* d_u);                                                            \
  void sigmoid_gate_fwd_range(int64_t n, const float* x, const float* g, float* out);                    \
  void sigmoid_gate_bwd_range(int64_t n, const float* d_out, const float* x, const float* g, float* d_x, \
                              float* d_g);                                                               \
  }
GODWIT_DECLARE(avx2)
GODWIT_DECLARE(avx512)
#undef GODWIT_DECLARE

}  // namespace godwit::kernels
