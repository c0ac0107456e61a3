#include "godwit/base/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace godwit {
namespace {

ParallelHooks g_hooks;
std::atomic<int> g_threads{0};
thread_local bool t_inside = false;

int default_threads() {
  return std::max(1u, std::thread::hardware_concurrency());
}

// Starts its threads anew each time: good enough for tools without LibTorch, where one call does long work.
void run_std(int64_t begin, int64_t end, int64_t grain, const RangeFn& fn) {
  const int64_t n = end - begin;
  const int64_t parts = std::min<int64_t>(num_threads(), (n + grain - 1) / grain);
  const int64_t step = (n + parts - 1) / parts;
  std::exception_ptr error;
  std::mutex error_mutex;
  const auto work = [&](int64_t part) {
    t_inside = true;
    try {
      const int64_t from = begin + part * step;
      const int64_t to = std::min(end, from + step);
      if (from < to) fn(from, to);
    } catch (...) {
      const std::lock_guard lock(error_mutex);
      error = std::current_exception();
    }
    t_inside = false;
  };
  std::vector<std::thread> threads;
  for (int64_t part = 1; part < parts; ++part) threads.emplace_back(work, part);
  work(0);
  for (auto& thread : threads) thread.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace

void set_parallel_hooks(ParallelHooks hooks) {
  g_hooks = hooks;
}

int num_threads() {
  if (g_hooks.num_threads) return g_hooks.num_threads();
  const int threads = g_threads.load(std::memory_order_relaxed);
  return threads > 0 ? threads : default_threads();
}

void set_num_threads(int threads) {
  if (g_hooks.set_num_threads) return g_hooks.set_num_threads(threads);
  g_threads.store(std::max(1, threads), std::memory_order_relaxed);
}

void parallel_for(int64_t begin, int64_t end, int64_t grain, const RangeFn& fn) {
  if (begin >= end) return;
  grain = std::max<int64_t>(1, grain);
  if (t_inside || end - begin <= grain || num_threads() == 1) return fn(begin, end);
  if (g_hooks.run) return g_hooks.run(begin, end, grain, fn);
  run_std(begin, end, grain, fn);
}

}  // namespace godwit
