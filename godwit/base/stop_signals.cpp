#include "godwit/base/stop_signals.h"

namespace godwit {
namespace {

volatile std::sig_atomic_t g_stop = 0;

}  // namespace

StopSignals::StopSignals() {
  g_stop = 0;
  struct sigaction action = {};
  action.sa_handler = [](int) { g_stop = 1; };
  sigaction(SIGTERM, &action, &old_term_);
  sigaction(SIGINT, &action, &old_int_);
}

StopSignals::~StopSignals() {
  sigaction(SIGTERM, &old_term_, nullptr);
  sigaction(SIGINT, &old_int_, nullptr);
}

bool StopSignals::asked() {
  return g_stop != 0;
}

}  // namespace godwit
