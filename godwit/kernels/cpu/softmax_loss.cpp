// Three sweeps over a row that lies in the second-level cache: largest value, exponentials and their sum,
// scaling.
#include "godwit/kernels/cpu/lanes.h"
#include "godwit/kernels/cpu/softmax_loss_isa.h"

namespace godwit::kernels::GODWIT_ISA {
namespace {

float largest(const float* x, int64_t n) {
  Vec top = splat(-__builtin_inff());
  for_vectors(n,
              [&](int64_t i, auto lanes) { top = vmax(load_lanes(x + i, lanes, -__builtin_inff()), top); });
  float all = top[0];
  for (int i = 1; i < kLanes; ++i) all = top[i] > all ? top[i] : all;
  return all;
}

}  // namespace

void softmax_loss_range(const SoftmaxLoss& a, int64_t begin, int64_t end) {
  const int64_t n = a.vocabulary;
  for (int64_t r = begin; r < end; ++r) {
    float* x = a.logits + r * n;
    const int64_t target = a.targets[r];
    if (target < 0) {
      a.nll[r] = 0;
      if (a.gradient) std::memset(x, 0, n * sizeof(float));
      continue;
    }
    const float top = largest(x, n), at_target = x[target];
    Vec sums = {};
    for_vectors(n, [&](int64_t i, auto lanes) {
      const Vec e = vexp(load_lanes(x + i, lanes, -__builtin_inff()) - splat(top));
      sums += e;
      if (a.gradient) store_lanes(x + i, e, lanes);
    });
    const float sum = reduce_add(sums);
    a.nll[r] = __builtin_logf(sum) + top - at_target;
    if (!a.gradient) continue;
    const float scale = a.weights[r] / sum;
    for_vectors(n, [&](int64_t i, auto lanes) {
      store_lanes(x + i, load_lanes(x + i, lanes) * splat(scale), lanes);
    });
    x[target] -= a.weights[r];
  }
}

}  // namespace godwit::kernels::GODWIT_ISA
