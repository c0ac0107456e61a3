// The part of softmax_loss that is compiled for each instruction set.
#pragma once

#include "godwit/kernels/softmax_loss.h"

namespace godwit::kernels {

#define GODWIT_DECLARE(isa)                                                     \
  namespace isa {                                                               \
  void softmax_loss_range(const SoftmaxLoss& args, int64_t begin, int64_t end); \
  }
GODWIT_DECLARE(avx2)
GODWIT_DECLARE(avx512)
#undef GODWIT_DECLARE

}  // namespace godwit::kernels
