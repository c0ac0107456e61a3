// Tokens drawn where the logits lie, many rows at once: for vocabularies of 100,000 and more the host takes
// longer to look at the logits of a few dozen sequences than a GPU to make them.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "godwit/infer/sampling.h"

namespace godwit {

struct DeviceDraw {
  int64_t row = 0;                         // of the logits
  const SamplingParams* params = nullptr;  // of the kind that draws_on_device takes
  int64_t position = 0;
  at::Tensor forbidden;  // [V] bool on the logits' device
};

// Whether these need no more than temperature and seed: no cut of the distribution, no penalties, no bias.
bool draws_on_device(const SamplingParams& params);

struct DeviceOutcome {
  Sampled sampled;
  std::string error = {};  // what sample() would have thrown
};

// sample() of each row of logits [N, V] fp32, up to the rounding of sums.
std::vector<DeviceOutcome> draw_on_device(const at::Tensor& logits, const std::vector<DeviceDraw>& draws);

}  // namespace godwit
