#include "godwit/kernels/softmax_loss.h"

#include "godwit/base/parallel.h"
#include "godwit/kernels/cpu/dispatch/isa.h"
#include "godwit/kernels/cpu/softmax_loss_isa.h"

namespace godwit::kernels {

void softmax_loss(int64_t rows, const SoftmaxLoss& args) {
  parallel_for(0, rows, 1,
               [&](int64_t begin, int64_t end) { GODWIT_DISPATCH(softmax_loss_range, args, begin, end); });
}

}  // namespace godwit::kernels
