// Muon's elementwise kernels against fp64 on the host. Needs a GPU of compute capability 9.0:
//   muon_gpu_test      exit status 0 if every value is that of the formula in fp64, to the rounding of its
//   type
#include <cmath>
#include <cstdio>
#include <vector>

#include "godwit/kernels/muon_gpu.h"
#include "tests/cuda/gpu_values.cuh"

namespace gpu = godwit::kernels::cuda;

namespace {

// Largest error in units of `step` times `size`, that of the terms a value is the sum of.
double worst(const Doubles& want, const Doubles& got, const Doubles& size, double step) {
  double most = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double error = std::abs(got[i] - want[i]) / (step * std::max(size[i], 1e-30));
    if (!(error <= most)) most = error;  // NaN counts
  }
  return most;
}

Doubles wide_floats(const Floats& x) {
  return {x.begin(), x.end()};
}

int failures = 0;
void expect(const char* what, size_t n, double error, double limit) {
  const bool good = error <= limit;
  std::printf("%-28s n %9zu  %.3f of %.1f steps%s\n", what, n, error, limit, good ? "" : "  FAILED");
  failures += !good;
}

void run(size_t n, bool bf16_grad, bool nesterov, bool with_copy) {
  constexpr float kScale = 0.37f, kMu = 0.95f, kKeep = 0.999f, kRate = 0.03f;
  constexpr double kFloatStep = 0x1p-23, kHalfStep = 0x1p-8;  // half the distance of neighbours, at most
  const Bits half = halves(n);
  const Floats full = floats(n), before = floats(n), weight_before = floats(n);
  const Doubles g = bf16_grad ? wide(half) : wide_floats(full);
  Buffer<uint16_t> grad_half(half), update(Bits(n, 0x7fff)), copy(Bits(n, 0x7fff));
  Buffer<float> grad_full(full), momentum(before), weight(weight_before);
  const void* grad = bf16_grad ? static_cast<const void*>(grad_half.get()) : grad_full.get();
  int error = gpu::muon_momentum({.n = int64_t(n),
                                  .grad = grad,
                                  .grad_bf16 = bf16_grad,
                                  .momentum = momentum.get(),
                                  .update = update.get(),
                                  .grad_scale = kScale,
                                  .mu = kMu,
                                  .nesterov = nesterov});
  error |= gpu::muon_weight({.n = int64_t(n),
                             .update = update.get(),
                             .weight = weight.get(),
                             .copy = with_copy ? copy.get() : nullptr,
                             .keep = kKeep,
                             .rate = kRate});
  if (error != 0) {
    std::printf("a launch failed: %d\n", error);
    ++failures;
    return;
  }
  const Bits u = update.take(), c = copy.take();
  Doubles m_want(n), m_size(n), u_want(n), u_size(n), w_want(n), w_size(n);
  for (size_t i = 0; i < n; ++i) {
    const double grad = double(kScale) * g[i], kept = double(kMu) * before[i];
    m_want[i] = grad + kept, m_size[i] = std::abs(grad) + std::abs(kept);
    u_want[i] = nesterov ? grad + double(kMu) * m_want[i] : m_want[i];
    // Half the distance of neighbours of bf16, and what fp32 loses before it.
    u_size[i] = std::abs(u_want[i]) + 0x1p-13 * m_size[i];
    const double stays = double(kKeep) * weight_before[i], moves = double(kRate) * bf16_value(u[i]);
    w_want[i] = stays - moves, w_size[i] = std::abs(stays) + std::abs(moves);
  }
  const Floats w = weight.take();
  Doubles c_size(n);
  for (size_t i = 0; i < n; ++i) c_size[i] = std::abs(w[i]);
  expect("momentum", n, worst(m_want, wide_floats(momentum.take()), m_size, kFloatStep), 1);
  expect("update", n, worst(u_want, wide(u), u_size, kHalfStep), 1);
  expect("weight", n, worst(w_want, wide_floats(w), w_size, kFloatStep), 1);
  if (with_copy) {
    expect("copy", n, worst(wide_floats(w), wide(c), c_size, kHalfStep), 1);
  } else {
    bool same = true;
    for (const uint16_t bits : c) same &= bits == 0x7fff;
    expect("no copy", n, same ? 0 : 1, 0);
  }
}

}  // namespace

int main() {
  for (const size_t n : {size_t{8}, size_t{1016}, size_t{2048}, size_t{65536} + 8, size_t{5000} * 1000})
    for (int form = 0; form < 8; ++form) run(n, form & 1, form & 2, form & 4);
  std::printf(failures ? "%d failures\n" : "all as expected\n", failures);
  return failures != 0;
}
