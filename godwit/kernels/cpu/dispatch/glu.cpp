#include "godwit/kernels/glu.h"

#include "godwit/base/parallel.h"
#include "godwit/kernels/cpu/dispatch/isa.h"
#include "godwit/kernels/cpu/glu_isa.h"

namespace godwit::kernels {
namespace {

constexpr int64_t kGrain = 16384;

}  // namespace

void glu_fwd(int64_t n, const float* g, const float* u, GluForm form, float* out) {
  parallel_for(0, n, kGrain, [&](int64_t begin, int64_t end) {
    GODWIT_DISPATCH(glu_fwd_range, end - begin, g + begin, u + begin, form, out + begin);
  });
}

void glu_bwd(int64_t n, const float* d_out, const float* g, const float* u, GluForm form, float* d_g,
             float* d_u) {
  parallel_for(0, n, kGrain, [&](int64_t begin, int64_t end) {
    GODWIT_DISPATCH(glu_bwd_range, end - begin, d_out + begin, g + begin, u + begin, form, d_g + begin,
                    d_u + begin);
  });
}

void sigmoid_gate_fwd(int64_t n, const float* x, const float* g, float* out) {
  parallel_for(0, n, kGrain, [&](int64_t begin, int64_t end) {
    GODWIT_DISPATCH(sigmoid_gate_fwd_range, end - begin, x + begin, g + begin, out + begin);
  });
}

void sigmoid_gate_bwd(int64_t n, const float* d_out, const float* x, const float* g, float* d_x, float* d_g) {
  parallel_for(0, n, kGrain, [&](int64_t begin, int64_t end) {
    GODWIT_DISPATCH(sigmoid_gate_bwd_range, end - begin, d_out + begin, x + begin, g + begin, d_x + begin,
                    d_g + begin);
  });
}

}  // namespace godwit::kernels
