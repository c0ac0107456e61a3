// Memory of a training run: the forecast of its recipe, what the machine has, what the run took.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "godwit/model/config.h"
#include "godwit/plan/train_memory.h"
#include "godwit/train/recipe.h"
#include "godwit/train/setup.h"

namespace godwit::cli {

struct RunForecast {
  TrainMemory memory;
  std::string stage;  // the one that needs most
  TrainShape shape;
};

// What one micro-batch of a stage looks like; `ranks` share each batch.
TrainShape stage_shape(const Recipe& recipe, const StageOptions& stage, c10::Device device, int64_t ranks);

// Of the stage that needs most. `ranks` share each batch. With `data` their pictures count too.
RunForecast forecast_run(const Recipe& recipe, const ModelConfig& config, c10::Device device, int64_t ranks,
                         const RunData* data = nullptr);

// Bytes that this process can still take: of the system and its control group, or of the device.
double available_memory(c10::Device device);

// The same for an engine's options.
int64_t memory_budget(c10::Device device);

// Most that this process ever held: its resident set, or what the device's allocator handed out. 0: unknown.
double peak_memory(c10::Device device);

// Throws Error when the forecast exceeds what is there, naming the batch and the nearest setting that fits.
void check_memory(const RunForecast& forecast, const ModelConfig& config, double available);

}  // namespace godwit::cli
