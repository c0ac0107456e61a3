#include "bench/kda_timing.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <vector>

#include "godwit/ops/ops.h"

namespace godwit::bench {
namespace {

using at::Tensor;

void wait_for(c10::Device device) {
  if (!device.is_cpu()) c10::impl::getDeviceGuardImpl(device.type())->synchronizeDevice(device.index());
}

// Of one call. A GPU gets ten calls between two waits, so that it and not its launches is timed.
template <class Fn>
double best_ms(c10::Device device, int repeats, const Fn& fn) {
  const int calls = device.is_cpu() ? 1 : 10;
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i <= repeats; ++i) {  // the first call warms up
    wait_for(device);
    const auto start = std::chrono::steady_clock::now();
    for (int call = 0; call < calls; ++call) fn();
    wait_for(device);
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    if (i > 0) best = std::min(best, took.count() / calls);
  }
  return best;
}

struct Inputs {
  Tensor q, k, v, z, A_log, dt_bias, b;
  Inputs(int64_t T, int64_t H, int64_t D, c10::Device device) {
    const auto fp32 = at::TensorOptions(at::kFloat).device(device);
    const auto wide = fp32.dtype(device.is_cpu() ? at::kFloat : at::kBFloat16);
    q = at::randn({T, H, D}, wide), k = at::randn({T, H, D}, wide), v = at::randn({T, H, D}, wide);
    z = at::randn({T, H, D}, wide) - 2, b = at::randn({T, H}, wide);
    A_log = at::zeros({H}, fp32), dt_bias = at::randn({H, D}, fp32);
  }
};

// One sequence, state [H, K, V], a few batched products a token: what a model does without a kernel.
void recurrence(const Inputs& x, double gate_bound) {
  const int64_t T = x.q.size(0), H = x.q.size(1), D = x.q.size(2);
  const auto normalize = [](const Tensor& a) { return a * at::rsqrt((a * a).sum(-1, true) + 1e-6); };
  const auto fp32 = [](const Tensor& a) { return a.to(at::kFloat); };
  const Tensor q = normalize(fp32(x.q)) / std::sqrt(static_cast<double>(D)), k = normalize(fp32(x.k)),
               v = fp32(x.v), beta = at::sigmoid(fp32(x.b));
  const Tensor u = fp32(x.z) + x.dt_bias, rate = at::exp(x.A_log).unsqueeze(-1);
  const Tensor alpha =
      at::exp(gate_bound < 0 ? gate_bound * at::sigmoid(rate * u) : -rate * at::softplus(u)).unsqueeze(-1);
  Tensor S = at::zeros({H, D, D}, v.options());
  const Tensor o = at::empty({T, H, D}, v.options());
  for (int64_t t = 0; t < T; ++t) {
    S.mul_(alpha[t]);
    const Tensor error = (v[t] - at::bmm(k[t].unsqueeze(1), S).squeeze(1)) * beta[t].unsqueeze(-1);
    S.baddbmm_(k[t].unsqueeze(2), error.unsqueeze(1));
    o[t].copy_(at::bmm(q[t].unsqueeze(1), S).squeeze(1));
  }
}

}  // namespace

KdaTimes time_kda(const KdaTimingCase& c, int repeats, bool with_recurrence) {
  const Inputs x(c.tokens, c.heads, c.width, c.device);
  const Tensor cu = at::arange(0, c.sequences + 1, at::kLong) * c.tokens / c.sequences;
  const Tensor offsets = cu.to(at::kLong).contiguous();
  const auto run = [&](const Inputs& in) {
    return ops::kda_chunk(in.q, in.k, in.v, in.z, in.A_log, in.dt_bias, in.b, c.gate_bound, std::nullopt,
                          offsets);
  };
  KdaTimes times;
  {
    const at::NoGradGuard no_grad;
    times.forward = best_ms(c.device, repeats, [&] { run(x); });
    if (with_recurrence)
      times.recurrence = best_ms(c.device, std::min(repeats, 3), [&] { recurrence(x, c.gate_bound); });
  }
  Inputs leaves = x;
  const std::vector<Tensor> inputs = {leaves.q,     leaves.k,       leaves.v, leaves.z,
                                      leaves.A_log, leaves.dt_bias, leaves.b};
  for (const Tensor& t : inputs) t.requires_grad_(true);
  const Tensor grad = at::randn(x.v.sizes(), x.v.options());
  times.forward_backward = best_ms(c.device, repeats, [&] {
    std::get<0>(run(leaves)).backward(grad);
    for (const Tensor& t : inputs) t.mutable_grad() = Tensor();
  });
  return times;
}

double time_kda_step(const KdaTimingCase& c, int repeats) {
  const at::NoGradGuard no_grad;
  const Inputs x(c.sequences, c.heads, c.width, c.device);
  Tensor state = at::randn({c.sequences, c.heads, c.width, c.width}, x.A_log.options()) * 0.1;
  return best_ms(c.device, repeats,
                 [&] { ops::kda_step(x.q, x.k, x.v, x.z, x.A_log, x.dt_bias, x.b, c.gate_bound, state); });
}

double copy_bandwidth(c10::Device device) {
  const int64_t bytes = int64_t{1} << (device.is_cpu() ? 28 : 32);  // far more than any cache holds
  const Tensor from = at::ones({bytes}, at::TensorOptions(at::kByte).device(device)),
               to = at::empty_like(from);
  return 2e3 * static_cast<double>(bytes) / best_ms(device, 3, [&] { to.copy_(from); });
}

}  // namespace godwit::bench
