// Timing for the benchmarks: best of several, wall clock and CPU time of the process. On a shared machine the
// CPU time says more; it includes threads that spin while they wait.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <string>

namespace godwit::bench {

struct Time {
  double wall_ms = 1e30;
  double cpu_ms = 1e30;
};

template <class Fn>
Time best_of(int repeats, const Fn& fn) {
  Time best;
  fn();  // warm: pages, scratch memory, thread pool
  for (int i = 0; i < repeats; ++i) {
    const std::clock_t cpu = std::clock();
    const auto wall = std::chrono::steady_clock::now();
    fn();
    const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - wall;
    best.wall_ms = std::min(best.wall_ms, elapsed.count());
    best.cpu_ms = std::min(best.cpu_ms, 1e3 * static_cast<double>(std::clock() - cpu) / CLOCKS_PER_SEC);
  }
  return best;
}

// One line: name, times, and GFLOP/s where `flops` is given.
inline void report(const std::string& name, Time t, double flops = 0) {
  fmt::print("{:<44} {:>9.3f} ms wall {:>9.3f} ms CPU", name, t.wall_ms, t.cpu_ms);
  if (flops > 0)
    fmt::print("  {:>7.1f} GFLOP/s wall, {:>6.1f} a CPU second", flops / t.wall_ms / 1e6,
               flops / t.cpu_ms / 1e6);
  fmt::print("\n");
}

}  // namespace godwit::bench
