// SIGTERM and SIGINT as a wish: the run saves and ends by itself.
#pragma once

#include <csignal>

namespace godwit {

// While it lives the two signals set a flag; the old handlers come back with its end. One at a time.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  static bool asked();

 private:
  struct sigaction old_term_ = {}, old_int_ = {};
};

}  // namespace godwit
