#include "godwit/kernels/qb_histogram.h"

#include "godwit/base/parallel.h"
#include "godwit/kernels/cpu/dispatch/isa.h"
#include "godwit/kernels/cpu/dispatch/scratch.h"
#include "godwit/kernels/cpu/qb_histogram_isa.h"

namespace godwit::kernels {

void qb_histogram(const Histogram& args) {
  const int64_t blocks = (args.experts + kHistogramExperts - 1) / kHistogramExperts;
  parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    auto* local = reinterpret_cast<int32_t*>(thread_scratch(kHistogramExperts * args.bins));
    for (int64_t b = begin; b < end; ++b)
      GODWIT_DISPATCH(histogram_experts, args, b * kHistogramExperts, local);
  });
}

}  // namespace godwit::kernels
