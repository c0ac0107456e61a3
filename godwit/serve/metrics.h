// What a running server counts, in the text form that Prometheus reads (exposition format 0.0.4).
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

#include "godwit/infer/engine.h"

namespace godwit::serve {

// Seconds, in buckets from 1 ms up.
class LatencyHistogram {
 public:
  void add(double seconds);
  std::string text(const std::string& name, const std::string& help) const;

 private:
  static constexpr std::array<double, 14> kBounds = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,
                                                     0.25,  0.5,    1,     2.5,  5,     10,   60};
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

struct Metrics {
  LatencyHistogram first_token;  // from the request's arrival
  LatencyHistogram between_tokens;
  RecentRate tokens;  // drawn

  std::string text(const EngineStats& stats) const;
};

}  // namespace godwit::serve
