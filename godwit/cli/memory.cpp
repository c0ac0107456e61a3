#include "godwit/cli/memory.h"

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>

#include "godwit/base/check.h"
#include "godwit/cli/support.h"

namespace godwit::cli {
namespace {

constexpr double kUnlimited = std::numeric_limits<double>::infinity();

// The number behind `key` in a file of "key number ..." lines; `otherwise` where there is none.
double number_after(const char* file, const std::string& key, double otherwise) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    std::string name;
    double value = 0;
    if (words >> name && name == key && words >> value) return value;
  }
  return otherwise;
}

double first_number(const char* file) {
  std::ifstream in(file);
  double value = 0;
  return in >> value ? value : kUnlimited;  // "max": no limit
}

// A control group (version 2) counts the page cache as its own, which gives way.
double available_in_group() {
  const double limit = first_number("/sys/fs/cgroup/memory.max");
  const double used = first_number("/sys/fs/cgroup/memory.current");
  if (limit == kUnlimited || used == kUnlimited) return kUnlimited;
  return limit - used + number_after("/sys/fs/cgroup/memory.stat", "inactive_file", 0);
}

c10::DeviceAllocator& allocator_of(c10::Device device) {
  at::globalContext().lazyInitDevice(device.type());
  return *c10::getDeviceAllocator(device.type());
}

// Tokens of one forward and backward, as the trainer cuts them: whole sequences.
int64_t micro_tokens(const Recipe& recipe, const StageOptions& stage, int64_t ranks) {
  const int64_t sequences = std::max<int64_t>(1, stage.batch_tokens / stage.context / ranks);
  const int64_t wanted = recipe.train.micro_batch_tokens;
  const int64_t rows = wanted > 0 ? std::max<int64_t>(1, wanted / stage.context) : sequences;
  return std::min(rows, sequences) * stage.context;
}

// The pictures of a micro-batch: those of so many tokens of the stage's mix.
void add_pictures(const Recipe& recipe, const StageOptions& stage, const RunData& data, TrainShape& shape) {
  double weights = 0, patches = 0, vectors = 0;
  for (size_t i = 0; i < recipe.data.size(); ++i) {
    const auto named = stage.mix.find(recipe.data[i].name);
    const double weight = stage.mix.empty()          ? recipe.data[i].weight
                          : named == stage.mix.end() ? 0.0
                                                     : named->second;
    const data::TokenDataset& dataset = *data.train[i];
    const double share = weight / std::max<double>(1, static_cast<double>(dataset.tokens()));
    weights += weight;
    patches += share * static_cast<double>(dataset.media_patches());
    vectors += share * static_cast<double>(dataset.media_vectors());
  }
  const double tokens = static_cast<double>(shape.micro_tokens) / std::max(weights, 1e-300);
  shape.patches = static_cast<int64_t>(patches * tokens);
  shape.vectors = static_cast<int64_t>(vectors * tokens);
}

}  // namespace

TrainShape stage_shape(const Recipe& recipe, const StageOptions& stage, c10::Device device, int64_t ranks) {
  TrainShape shape{.context = stage.context, .micro_tokens = micro_tokens(recipe, stage, ranks)};
  shape.accumulate = shape.micro_tokens * ranks < stage.batch_tokens;
  shape.bf16 = recipe.train.dtype == TrainDtype::kBf16;
  shape.recompute = recipe.train.recompute == Recompute::kBlock;
  shape.quantile = recipe.balance.method == BalanceMethod::kQuantile;
  shape.cuda = device.is_cuda();
  shape.fused = fused_ops(shape.cuda);
  return shape;
}

RunForecast forecast_run(const Recipe& recipe, const ModelConfig& config, c10::Device device, int64_t ranks,
                         const RunData* data) {
  RunForecast most;
  for (const StageOptions& stage : recipe.stages) {
    TrainShape shape = stage_shape(recipe, stage, device, ranks);
    if (data) add_pictures(recipe, stage, *data, shape);
    const TrainMemory memory = forecast_training(config, shape);
    if (!most.stage.empty() && memory.total() <= most.memory.total()) continue;
    most = {.memory = memory, .stage = stage.name, .shape = shape};
  }
  return most;
}

double available_memory(c10::Device device) {
  if (!device.is_cpu()) return static_cast<double>(allocator_of(device).getMemoryInfo(device.index()).first);
  const double system = number_after("/proc/meminfo", "MemAvailable:", kUnlimited) * 1024;
  return std::min(system, available_in_group());
}

int64_t memory_budget(c10::Device device) {
  return static_cast<int64_t>(std::min(available_memory(device), 9e18));
}

double peak_memory(c10::Device device) {
  if (device.is_cpu()) return number_after("/proc/self/status", "VmHWM:", 0) * 1024;
  const auto stats = allocator_of(device).getDeviceStats(device.index());
  return static_cast<double>(stats.allocated_bytes[0].peak);  // [0]: of all pools
}

void check_memory(const RunForecast& forecast, const ModelConfig& config, double available) {
  const double needed = forecast.memory.total();
  if (needed <= available) return;
  const auto fits = [&](const TrainShape& shape) {
    return forecast_training(config, shape).total() <= available;
  };
  const TrainShape& asked = forecast.shape;
  std::string way;
  for (int64_t rows = asked.micro_tokens / asked.context; rows >= 1 && way.empty(); rows /= 2) {
    TrainShape shape = asked;
    shape.micro_tokens = rows * asked.context;
    shape.patches = asked.patches * shape.micro_tokens / asked.micro_tokens;
    shape.vectors = asked.vectors * shape.micro_tokens / asked.micro_tokens;
    shape.accumulate = asked.accumulate || shape.micro_tokens < asked.micro_tokens;
    const std::string smaller = shape.micro_tokens < asked.micro_tokens
                                    ? fmt::format("train.micro_batch_tokens={}", shape.micro_tokens)
                                    : "";
    if (!smaller.empty() && fits(shape)) way = "--set " + smaller;
    shape.recompute = true;
    if (way.empty() && !asked.recompute && fits(shape))
      way = "--set train.recompute=block" + (smaller.empty() ? "" : " --set " + smaller);
  }
  fail("stage {}: {} tokens at once need about {}, there are {} free; {} (--no-memory-check tries anyway)",
       forecast.stage, asked.micro_tokens, human_bytes(needed), human_bytes(available),
       way.empty() ? "no smaller micro-batch fits: take a smaller model" : "this fits: " + way);
}

}  // namespace godwit::cli
