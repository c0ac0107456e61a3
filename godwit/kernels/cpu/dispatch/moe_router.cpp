#include "godwit/kernels/moe_router.h"

#include "godwit/base/parallel.h"
#include "godwit/kernels/cpu/dispatch/isa.h"
#include "godwit/kernels/cpu/dispatch/scratch.h"
#include "godwit/kernels/cpu/moe_router_isa.h"

namespace godwit::kernels {
namespace {

constexpr int64_t kGrain = 16;  // tokens: some 10 us

}  // namespace

void moe_router_fwd(int64_t tokens, const RouterForward& args) {
  parallel_for(0, tokens, kGrain, [&](int64_t begin, int64_t end) {
    float* scratch = thread_scratch(router_scratch(args.form));
    GODWIT_DISPATCH(router_fwd_range, args, begin, end, scratch);
  });
}

void moe_router_bwd(int64_t tokens, const RouterBackward& args) {
  parallel_for(0, tokens, kGrain,
               [&](int64_t begin, int64_t end) { GODWIT_DISPATCH(router_bwd_range, args, begin, end); });
}

}  // namespace godwit::kernels
