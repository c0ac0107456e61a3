// Finds the rank that died or hangs, within a bounded time, and ends this process with a line that names it.
//
// Every rank writes a sign of life into the store a few times a second, with how many collectives it has
// entered, and reads those of the others. From that each rank tells by itself:
//   gone    a rank's sign of life has not changed for the time limit (at once where a collective broke off:
//   then a few
//           periods are enough),
//   hangs   this rank has waited in a collective for the time limit, and that one has not entered it, nor
//   said that
//           it is busy (writing a checkpoint),
//   failed  it left word of an error of its own before it ended.
// The first to find out leaves word in the store, so that all end with the same line. A main thread inside a
// collective cannot be interrupted, so the process ends from the monitor's thread, with exit code 1: whatever
// is on disk under a final name is whole (io/file.h).
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace godwit::dist {

struct MonitorOptions {
  c10::intrusive_ptr<c10d::Store> store;  // a connection of the monitor's own: its calls may block
  std::string store_owner;                // who is to blame when the store does not answer
  bool serves_store = false;              // this process holds the store
  int64_t rank = 0;
  std::vector<std::string> hosts;  // by rank
  double timeout_s = 60;
};

class Monitor {
 public:
  explicit Monitor(
      MonitorOptions options);  // every rank must have come this far before the first watches: see start()
  ~Monitor();
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  // Begins to watch. All ranks have been constructed by now.
  void start();
  // Ends the threads; nothing is watched any more.
  void stop();

  // Around every collective of the main thread. `name` is a literal.
  void enter(const char* name);
  void leave();
  // Around long work that the others wait for.
  void busy(bool is_busy) { busy_ = is_busy; }

  // A collective broke off with `reason`. Waits until it is clear which rank is to blame, which ends the
  // process; when no rank is, throws Error with the reason.
  [[noreturn]] void broken(const std::string& reason);

  // Leaves word of this rank's error for the others, and ends the watch.
  void announce(const std::string& message);

 private:
  using Clock = std::chrono::steady_clock;
  struct Peer {
    std::string sign;  // as last read
    Clock::time_point changed;
    int64_t entered = 0;
    bool busy = false;
    Clock::time_point last_busy;
  };

  void beat_loop();
  void watch_loop();
  bool wait_period();
  void beat();
  std::string verdict(Clock::time_point now) const;
  std::string name_of(int64_t rank) const;
  [[noreturn]] void end_with(const std::string& message);  // this process
  [[noreturn]] void end_everyone(const std::string& message);

  MonitorOptions options_;
  std::chrono::duration<double> limit_, period_;
  std::vector<Peer> peers_;  // the beat thread's
  int64_t beats_ = 0;
  std::atomic<int64_t> entered_{0};
  std::atomic<const char*> inside_{nullptr};  // the collective that the main thread is in
  std::atomic<Clock::time_point> since_{Clock::time_point{}};
  std::atomic<bool> busy_{false}, broken_{false};
  std::atomic<Clock::time_point> answered_{Clock::time_point{}};  // the store, last
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::thread beats_thread_, watch_thread_;
};

}  // namespace godwit::dist
