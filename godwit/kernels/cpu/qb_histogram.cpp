// Experts in blocks whose 32-bit counters fit the second-level cache; a thread owns its experts' counters.
#include "godwit/kernels/cpu/lanes.h"
#include "godwit/kernels/cpu/qb_histogram_isa.h"
#include "godwit/kernels/cpu/simd.h"

namespace godwit::kernels::GODWIT_ISA {

void histogram_experts(const Histogram& a, int64_t first, int32_t* local) {
  const int64_t count = a.experts - first < kHistogramExperts ? a.experts - first : kHistogramExperts;
  const Vec last_bin = splat(static_cast<float>(a.bins - 1));
  std::memset(local, 0, count * a.bins * sizeof(int32_t));
  for (int64_t t = 0; t < a.tokens; ++t) {
    const float* row = a.scores + t * a.experts + first;
    constexpr int64_t kAhead = 16;  // rows: a block's part of a row is two lines, far from the next
    if (t + kAhead < a.tokens) {
      for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(row + kAhead * a.experts + i);
    }
    for_vectors(count, [&](int64_t i, auto lanes) {
      const Vec x = load_lanes(row + i, lanes), s = a.from_logits ? vsigmoid(x) : x;
      const Vec position = (splat(a.cutoff[t]) - s - splat(a.range_min)) * splat(a.bins_per_unit);
      // Truncation is the floor, since everything below 0 has become 0. A value that is not a number lands in
      // bin 0.
      const VecI bin = __builtin_convertvector(vmin(vmax(position, splat(0.0f)), last_bin), VecI);
      for (int64_t j = 0; j < lanes; ++j) ++local[(i + j) * a.bins + bin[j]];
    });
  }
  for (int64_t i = 0; i < count * a.bins; ++i) a.counts[first * a.bins + i] += local[i];
}

}  // namespace godwit::kernels::GODWIT_ISA
