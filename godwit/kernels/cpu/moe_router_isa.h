// The parts of moe_router that are compiled for each instruction set.
#pragma once

#include "godwit/kernels/moe_router.h"

namespace godwit::kernels {

// Floats of work memory for router_fwd_range.
inline int64_t router_scratch(const RouterForm& form) {
  return 4 * (form.experts + 64) + 2 * (form.k + 1) + 2 * form.groups;
}

#define GODWIT_DECLARE(isa)                                                                     \
  namespace isa {                                                                               \
  void router_fwd_range(const RouterForward& args, int64_t begin, int64_t end, float* scratch); \
  void router_bwd_range(const RouterBackward& args, int64_t begin, int64_t end);                \
  }
GODWIT_DECLARE(avx2)
GODWIT_DECLARE(avx512)
#undef GODWIT_DECLARE

}  // namespace godwit::kernels
