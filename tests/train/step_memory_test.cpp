// What a training step leaves in memory for the next one.
#include <ATen/ATen.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "godwit/train/setup.h"
#include "godwit/train/step.h"
#include "tests/support/meter.h"
#include "tests/train/tiny_run.h"

namespace godwit {
namespace {

class StepMemory : public test::TinyRun {};

// The first step makes no more than its activations and gradients; a later one must not hold the gradients of
// the step before besides (they were 165 MiB of `nano`'s 2.1 GiB).
TEST_F(StepMemory, LaterStepsTakeNoMoreThanTheFirst) {
  const Recipe made = recipe("run", {"model.override.num_experts=256"});
  const RunData data = open_data(made);
  const ModelConfig config = resolve_model(made, data);
  ModelWeights weights = init_weights(config, 1, at::kCPU, at::kFloat);
  dist::Group group;
  TrainStep step(made, config, weights, at::kCPU, group);
  set_requires_grad(config, weights, true);
  const auto loader = stage_loader(made, data, 0);
  const auto meter = std::make_shared<test::Meter>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
  std::vector<int64_t> peaks;
  for (int64_t n = 0; n < 3; ++n) {
    meter->peak = meter->live.load();
    step.run({.config = config, .loader = *loader, .batch = n, .lr_multiplier = 1.0});
    peaks.push_back(meter->peak);
  }
  EXPECT_GT(peaks[0], 1 << 20);  // the hooks are there
  EXPECT_LE(static_cast<double>(peaks[1]), 1.02 * static_cast<double>(peaks[0]));
  EXPECT_LE(static_cast<double>(peaks[2]), 1.02 * static_cast<double>(peaks[0]));
}

}  // namespace
}  // namespace godwit
