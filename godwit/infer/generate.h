// One request from beginning to end, for callers that wait for it.
#pragma once

#include <vector>

#include "godwit/infer/engine.h"

namespace godwit {

struct Generation {
  std::vector<int32_t> ids;
  std::vector<double> logprobs;
  Finish finish;
  double prefill_s = 0.0;  // until the first token
  double decode_s = 0.0;

  double tokens_per_s() const {
    return decode_s > 0 && !ids.empty() ? static_cast<double>(ids.size() - 1) / decode_s : 0.0;
  }
};

// Runs the engine until the request's first choice has ended. Throws Error when it failed.
Generation generate(Engine& engine, Request request);

}  // namespace godwit
