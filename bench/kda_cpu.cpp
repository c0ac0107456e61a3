#include "bench/kda_cpu.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <vector>

#include "godwit/ops/ops.h"

namespace godwit::bench {
namespace {

using at::Tensor;

template <class Fn>
double best_ms(int repeats, const Fn& fn) {
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i <= repeats; ++i) {  // the first call warms up
    const auto start = std::chrono::steady_clock::now();
    fn();
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    if (i > 0) best = std::min(best, took.count());
  }
  return best;
}

struct Inputs {
  Tensor q, k, v, z, A_log, dt_bias, b;
  Inputs(int64_t T, int64_t H, int64_t D)
      : q(at::randn({T, H, D})),
        k(at::randn({T, H, D})),
        v(at::randn({T, H, D})),
        z(at::randn({T, H, D}) - 2),
        A_log(at::zeros({H})),
        dt_bias(at::randn({H, D})),
        b(at::randn({T, H})) {}
};

// One sequence, state [H, K, V], a few batched products a token: what a model does without a kernel.
void recurrence(const Inputs& x, double gate_bound) {
  const int64_t T = x.q.size(0), H = x.q.size(1), D = x.q.size(2);
  const auto normalize = [](const Tensor& a) { return a * at::rsqrt((a * a).sum(-1, true) + 1e-6); };
  const Tensor q = normalize(x.q) / std::sqrt(static_cast<double>(D)), k = normalize(x.k),
               beta = at::sigmoid(x.b);
  const Tensor u = x.z + x.dt_bias, rate = at::exp(x.A_log).unsqueeze(-1);
  const Tensor alpha =
      at::exp(gate_bound < 0 ? gate_bound * at::sigmoid(rate * u) : -rate * at::softplus(u)).unsqueeze(-1);
  Tensor S = at::zeros({H, D, D});
  const Tensor o = at::empty({T, H, D});
  for (int64_t t = 0; t < T; ++t) {
    S.mul_(alpha[t]);
    const Tensor error = (x.v[t] - at::bmm(k[t].unsqueeze(1), S).squeeze(1)) * beta[t].unsqueeze(-1);
    S.baddbmm_(k[t].unsqueeze(2), error.unsqueeze(1));
    o[t].copy_(at::bmm(q[t].unsqueeze(1), S).squeeze(1));
  }
}

}  // namespace

KdaCpuTimes time_kda_cpu(const KdaCpuCase& c, int repeats, bool with_recurrence) {
  const Inputs x(c.tokens, c.heads, c.width);
  const Tensor cu = at::arange(0, c.sequences + 1, at::kLong) * c.tokens / c.sequences;
  const Tensor offsets = cu.to(at::kLong).contiguous();
  const auto run = [&](const Inputs& in) {
    return ops::kda_chunk(in.q, in.k, in.v, in.z, in.A_log, in.dt_bias, in.b, c.gate_bound, std::nullopt,
                          offsets);
  };
  KdaCpuTimes times;
  {
    const at::NoGradGuard no_grad;
    times.forward = best_ms(repeats, [&] { run(x); });
    if (with_recurrence)
      times.recurrence = best_ms(std::min(repeats, 3), [&] { recurrence(x, c.gate_bound); });
  }
  Inputs leaves = x;
  const std::vector<Tensor> inputs = {leaves.q,     leaves.k,       leaves.v, leaves.z,
                                      leaves.A_log, leaves.dt_bias, leaves.b};
  for (const Tensor& t : inputs) t.requires_grad_(true);
  const Tensor grad = at::randn(x.v.sizes());
  times.forward_backward = best_ms(repeats, [&] {
    std::get<0>(run(leaves)).backward(grad);
    for (const Tensor& t : inputs) t.mutable_grad() = Tensor();
  });
  return times;
}

double time_kda_step_cpu(int64_t sequences, int64_t heads, int64_t width, int repeats) {
  const at::NoGradGuard no_grad;
  const Inputs x(sequences, heads, width);
  Tensor state = at::randn({sequences, heads, width, width}) * 0.1;
  return best_ms(repeats, [&] {
    ops::kda_step(x.q, x.k, x.v, x.z, x.A_log, x.dt_bias, x.b, /*gate_bound=*/-5.0, state);
  });
}

}  // namespace godwit::bench
