#include "godwit/kernels/attn_res_mix.h"

#include <algorithm>

#include "godwit/base/parallel.h"
#include "godwit/kernels/cpu/attn_res_mix_isa.h"
#include "godwit/kernels/cpu/dispatch/isa.h"
#include "godwit/kernels/cpu/dispatch/scratch.h"

namespace godwit::kernels {

void attn_res_mix_fwd(int64_t tokens, const MixForward& args) {
  parallel_for(0, tokens, kMixTokens, [&](int64_t begin, int64_t end) {
    GODWIT_DISPATCH(mix_fwd_range, args, begin, end, thread_scratch(args.sources));
  });
}

// Chunks of kMixTokens tokens sum their key gradients apart; the chunks are added in order, so the result
// does not depend on the threads.
void attn_res_mix_bwd(int64_t tokens, const MixBackward& args) {
  const int64_t chunks = (tokens + kMixTokens - 1) / kMixTokens, width = args.width;
  const Scratch partial(chunks * width);
  parallel_for(0, chunks, 1, [&](int64_t first, int64_t last) {
    float* scratch = thread_scratch(6 * args.sources);
    for (int64_t c = first; c < last; ++c) {
      const int64_t end = std::min(tokens, (c + 1) * kMixTokens);
      GODWIT_DISPATCH(mix_bwd_range, args, c * kMixTokens, end, partial.data() + c * width, scratch);
    }
  });
  std::fill(args.d_key, args.d_key + width, 0.0f);
  for (int64_t c = 0; c < chunks; ++c) {
    for (int64_t i = 0; i < width; ++i) args.d_key[i] += partial.data()[c * width + i];
  }
}

}  // namespace godwit::kernels
