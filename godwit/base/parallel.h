// One pool of threads in the process. Kernels call parallel_for; where LibTorch is loaded, ops/ points it at
// ATen's pool, so that two pools never fight for the cores. Without LibTorch it runs on a plain pool of
// std::threads.
#pragma once

#include <cstdint>
#include <functional>

namespace godwit {

using RangeFn = std::function<void(int64_t begin, int64_t end)>;
using ParallelBackend = void (*)(int64_t begin, int64_t end, int64_t grain, const RangeFn& fn);

// Calls fn on disjoint ranges that cover [begin, end). Ranges hold at least `grain` items, except the last.
// Blocks until all are done. An exception in fn is rethrown here. Inside another parallel_for it runs
// serially.
void parallel_for(int64_t begin, int64_t end, int64_t grain, const RangeFn& fn);

// Runs fn with the pool's other threads awake: they take part in each parallel_for of fn and look for the
// next one meanwhile, so that many short loops in a row (a step of a model for one token) do not pay for
// waking threads. Loops are cut finer inside: a sixteenth of the grain is worth sharing. A thread that the
// system does not run is not waited for. Inside another parallel_for, or with one thread, it is a plain call.
void with_awake_threads(const std::function<void()>& fn);

// Threads a parallel_for may use; at least 1.
int num_threads();
void set_num_threads(int threads);

// For ops/: replaces the pool.
struct ParallelHooks {
  ParallelBackend run = nullptr;
  int (*num_threads)() = nullptr;
  void (*set_num_threads)(int) = nullptr;
};
void set_parallel_hooks(ParallelHooks hooks);

}  // namespace godwit
