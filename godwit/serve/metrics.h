// What a running server counts, in the text form that Prometheus reads (exposition format 0.0.4).
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "godwit/infer/engine.h"

namespace godwit::serve {

// Seconds, in buckets from 1 ms up.
class LatencyHistogram {
 public:
  void add(double seconds);
  std::string text(const std::string& name, const std::string& help) const;

 private:
  static constexpr std::array<double, 17> kBounds = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
                                                     1,     2.5,    5,     10,   30,    60,   300, 1800};
  mutable std::mutex mutex_;
  std::array<uint64_t, kBounds.size() + 1> counts_ = {};
  double sum_ = 0;
};

// Events of the last seconds.
class RecentRate {
 public:
  using Clock = std::chrono::steady_clock;
  void add(Clock::time_point now = Clock::now());
  double per_second(Clock::time_point now = Clock::now()) const;  // over the last kSeconds whole seconds

 private:
  static constexpr int64_t kSeconds = 10;
  struct Second {
    int64_t number = -1;  // of the clock's
    int64_t events = 0;
  };
  mutable std::mutex mutex_;
  std::array<Second, kSeconds + 1> seconds_ = {};
};

// Answers by path and status. Paths are those of the server's calls, not whatever clients ask for.
class AnswerCounts {
 public:
  void add(const std::string& path, int status);
  std::string text() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::pair<std::string, int>, uint64_t> counts_;
};

struct Metrics {
  LatencyHistogram first_token;  // from the request's arrival
  LatencyHistogram between_tokens;
  LatencyHistogram queue_time, request_time;      // from a request's arrival to its place, to its end
  RecentRate tokens;                              // drawn
  std::atomic<int64_t> waiting = 0, running = 0;  // requests
  std::atomic<int64_t> picture_tokens = 0;        // of the pictures that requests hold
  AnswerCounts answers;

  std::string text(const EngineStats& stats) const;
};

}  // namespace godwit::serve
