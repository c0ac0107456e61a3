// kda_cpu_bench [THREADS] [REPEATS]: KDA's CPU kernels beside a per-token recurrence in ATen. Every figure is
// the best of REPEATS (default 20), in fp32, K = V = 128.
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <string>

#include "bench/kda_timing.h"
#include "godwit/base/check.h"

namespace godwit::bench {
namespace {

void run(int threads, int repeats) {
  at::set_num_threads(threads);
  fmt::print("threads {}\n{:>8}{:>7}{:>6}{:>7}{:>12}{:>10}{:>22}{:>8}{:>20}\n", threads, "tokens", "heads",
             "seqs", "bound", "forward ms", "GFLOP/s", "forward+backward ms", "ratio", "ATen recurrence ms");
  for (const KdaTimingCase& c :
       {KdaTimingCase{}, KdaTimingCase{.gate_bound = 0}, KdaTimingCase{.sequences = 16},
        KdaTimingCase{.tokens = 4096, .heads = 2}, KdaTimingCase{.tokens = 4096, .heads = 1},
        KdaTimingCase{.tokens = 512, .heads = 2}, KdaTimingCase{.tokens = 16384, .heads = 2}}) {
    const bool with_peer = c.tokens == 4096 && c.heads == 8 && c.sequences == 1 && c.gate_bound < 0;
    const KdaTimes t = time_kda(c, repeats, with_peer);
    // Three products of 2 K V with the state, four triangles of 16 tokens.
    const double flops = static_cast<double>(c.tokens * c.heads) * (6.0 * 128 * 128 + 4.0 * 17 * 128);
    fmt::print("{:>8}{:>7}{:>6}{:>7}{:>12.2f}{:>10.0f}{:>22.2f}{:>8.2f}", c.tokens, c.heads, c.sequences,
               c.gate_bound, t.forward, flops / t.forward * 1e-6, t.forward_backward,
               t.forward_backward / t.forward);
    if (with_peer) fmt::print("{:>20.1f}", t.recurrence);
    fmt::print("\n");
  }
  for (const int64_t sequences : {1, 16, 64}) {
    const double ms = time_kda_step({.sequences = sequences}, 5 * repeats);
    fmt::print("step, {:>2} sequences, 8 heads: {:.4f} ms, {:.1f} GB/s of state read and written\n",
               sequences, ms, static_cast<double>(sequences) * 8 * 128 * 128 * 8 / ms * 1e-6);
  }
}

}  // namespace
}  // namespace godwit::bench

int main(int argc, char** argv) {
  try {
    godwit::bench::run(argc > 1 ? std::stoi(argv[1]) : at::get_num_threads(),
                       argc > 2 ? std::stoi(argv[2]) : 20);
  } catch (const std::exception& error) {
    fmt::print(stderr, "kda_cpu_bench: {}\n", error.what());
    return 1;
  }
  return 0;
}
