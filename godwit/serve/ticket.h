// One request's way through the server: it waits from its arrival until the engine takes it up, then it runs
// until it has been answered.
#pragma once

#include <atomic>
#include <chrono>

#include "godwit/serve/metrics.h"

namespace godwit::serve {

class Ticket {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Ticket(Metrics& metrics) : metrics_(metrics) { ++metrics_.waiting; }
  ~Ticket() {
    if (!runs_) {
      --metrics_.waiting;
    } else {
      --metrics_.running;
      metrics_.request_time.add(seconds());
    }
  }
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  // The engine has taken up the first of its sequences.
  void start() {
    if (runs_.exchange(true)) return;
    --metrics_.waiting;
    ++metrics_.running;
    metrics_.queue_time.add(seconds());
  }
  Clock::time_point arrived() const { return arrived_; }

 private:
  double seconds() const { return std::chrono::duration<double>(Clock::now() - arrived_).count(); }

  Metrics& metrics_;
  Clock::time_point arrived_ = Clock::now();
  std::atomic<bool> runs_ = false;
};

// The memory that a request's pictures take while it waits, in tokens. Given back when it is destroyed.
class PictureHold {
 public:
  explicit PictureHold(Metrics& metrics) : metrics_(metrics) {}
  ~PictureHold() { metrics_.picture_tokens -= tokens_; }
  PictureHold(const PictureHold&) = delete;
  PictureHold& operator=(const PictureHold&) = delete;

  // False where all requests together would hold more than `most`.
  bool add(int64_t tokens, int64_t most) {
    tokens_ += tokens;
    return metrics_.picture_tokens.fetch_add(tokens) + tokens <= most;
  }

 private:
  Metrics& metrics_;
  int64_t tokens_ = 0;
};

}  // namespace godwit::serve
