#include "godwit/base/parallel.h"

#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace godwit {
namespace {

ParallelHooks g_hooks;
std::atomic<int> g_threads{0};
thread_local bool t_inside = false;

int default_threads() {
  return std::max(1u, std::thread::hardware_concurrency());
}

constexpr int64_t kAwakeGrain = 16;     // the grain is divided by this among awake threads
constexpr int64_t kPartsPerThread = 3;  // of a loop among awake threads: the first to be free takes the next
constexpr int kSpins = 4000;            // looks at a flag before the thread offers its core to others

// Waits for what another thread does soon.
class Backoff {
 public:
  void pause() {
    if (++count_ < kSpins) {
      _mm_pause();
    } else {
      sched_yield();
    }
  }

 private:
  int count_ = 0;
};

// A leader that publishes loops and helpers that take parts of them. A part belongs to whoever takes it off
// the ticket; the leader takes parts too and waits only for parts that were taken.
class Team {
 public:
  explicit Team(int threads) : threads_(threads) {}
  int threads() const { return threads_; }

  void run(int64_t begin, int64_t end, int64_t grain, const RangeFn& fn) {
    const int64_t n = end - begin, most = (n + grain - 1) / grain;
    const auto parts = static_cast<uint32_t>(std::min<int64_t>(most, kPartsPerThread * threads_));
    if (parts <= 1) return fn(begin, end);
    fn_ = &fn, begin_ = begin, end_ = end, parts_ = parts;
    error_ = nullptr;
    done_.store(0, std::memory_order_relaxed);
    ticket_.store(++loops_ << 32 | parts, std::memory_order_release);
    while (take_part()) {
    }
    Backoff wait;
    while (done_.load(std::memory_order_acquire) != parts) wait.pause();
    if (error_) std::rethrow_exception(error_);
  }

  void help() {
    Backoff wait;
    while (!closed_.load(std::memory_order_acquire)) {
      if (take_part())
        wait = {};
      else
        wait.pause();
    }
  }
  void close() { closed_.store(true, std::memory_order_release); }

 private:
  bool take_part() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    do {
      if ((ticket & 0xffffffff) == 0) return false;
    } while (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel));
    const auto part = static_cast<int64_t>((ticket & 0xffffffff) - 1);
    const int64_t n = end_ - begin_, parts = parts_;
    const bool before = std::exchange(t_inside, true);
    try {
      (*fn_)(begin_ + n * part / parts, begin_ + n * (part + 1) / parts);
    } catch (...) {
      const std::lock_guard lock(error_mutex_);
      error_ = std::current_exception();
    }
    t_inside = before;
    done_.fetch_add(1, std::memory_order_release);
    return true;
  }

  const int threads_;
  // The loop: written by the leader while no part of the one before is out.
  const RangeFn* fn_ = nullptr;
  int64_t begin_ = 0, end_ = 0, parts_ = 0;
  uint64_t loops_ = 0;
  std::exception_ptr error_;
  std::mutex error_mutex_;
  alignas(64) std::atomic<uint64_t> ticket_{0};  // the loop's number, and its parts that nobody took yet
  alignas(64) std::atomic<uint32_t> done_{0};
  std::atomic<bool> closed_{false};
};

thread_local Team* t_team = nullptr;

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
  if (t_team) return t_team->threads();
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
  if (t_inside) return fn(begin, end);
  if (t_team) return t_team->run(begin, end, std::max<int64_t>(1, grain / kAwakeGrain), fn);
  if (end - begin <= grain || num_threads() == 1) return fn(begin, end);
  if (g_hooks.run) return g_hooks.run(begin, end, grain, fn);
  run_std(begin, end, grain, fn);
}

void with_awake_threads(const std::function<void()>& fn) {
  const int threads = num_threads();
  if (t_inside || t_team || threads == 1) return fn();
  Team team(threads);
  parallel_for(0, threads, 1, [&](int64_t begin, int64_t) {
    if (begin > 0) return team.help();  // the caller has the first range, and its thread's settings
    const bool before = std::exchange(t_inside, false);
    t_team = &team;
    const auto end_team = [&] {
      t_team = nullptr;
      t_inside = before;
      team.close();
    };
    try {
      fn();
    } catch (...) {
      end_team();
      throw;
    }
    end_team();
  });
}

}  // namespace godwit
