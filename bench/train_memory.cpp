// train_memory RECIPE [key=value]... [--cuda] [--blocks]: the memory of a recipe's training steps beside its
// forecast, stage by stage, without checkpoints or evaluation. Two steps a stage. `--blocks` lists what lies
// in memory at the peak, by the operation that allocated it: what a forecast that is off has forgotten.
// docs/plan.md has results.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <fmt/format.h>
#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "godwit/cli/memory.h"
#include "godwit/cli/support.h"
#include "godwit/train/setup.h"
#include "godwit/train/step.h"

namespace godwit::cli {
namespace {

constexpr double kMiB = 1 << 20;

// The operations at work on this thread, outermost first.
thread_local std::vector<const char*> t_ops;  // NOLINT: names live as long as their RecordFunction

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& fn) {
  t_ops.push_back(fn.name());
  return nullptr;
}
void leave(const at::RecordFunction&, at::ObserverContext*) {
  if (!t_ops.empty()) t_ops.pop_back();
}

// Outermost and innermost operation, and the innermost of ours between them.
std::string where() {
  if (t_ops.empty()) return "";
  const std::string outer = t_ops.front(), inner = t_ops.back();
  std::string ours;
  for (const char* op : t_ops)
    if (std::strncmp(op, "godwit::", 8) == 0) ours = op;
  std::string out = outer;
  if (!ours.empty() && ours != outer) out += " > " + ours;
  if (inner != outer && inner != ours) out += " > " + inner;
  return out;
}

// Live bytes of all tensors on one kind of device, their peak, and the blocks at (within 0.2 % of) the peak.
class Meter : public c10::MemoryReportingInfoBase {
 public:
  explicit Meter(c10::DeviceType type) : type_(type) {}

  void reportMemoryUsage(void* ptr, int64_t bytes, size_t, size_t, c10::Device device) override {
    if (device.type() != type_) return;
    const std::scoped_lock lock(mutex_);
    live_ += bytes;
    if (named_ && bytes > 0) blocks_[ptr] = {bytes, where()};
    if (named_ && bytes < 0) blocks_.erase(ptr);
    peak_ = std::max(peak_, live_);
    if (named_ && static_cast<double>(live_) > 1.002 * static_cast<double>(kept_at_)) {
      kept_at_ = live_;
      kept_ = blocks_;
      if (type_ == c10::DeviceType::CPU) heap_ = ::mallinfo2();
    }
  }
  bool memoryProfilingEnabled() const override { return true; }

  // Starts a new peak; with `named`, blocks allocated from here on are remembered once they come near `near`.
  void restart(bool named, int64_t near = 0) {
    const std::scoped_lock lock(mutex_);
    named_ = named, peak_ = live_;
    kept_at_ = static_cast<int64_t>(0.9 * static_cast<double>(near));
  }
  int64_t peak() const { return peak_; }
  int64_t live() const { return live_; }

  void print_blocks() const {
    std::map<std::string, std::map<int64_t, int64_t>> by_op;
    std::map<std::string, int64_t> sum;
    int64_t all = 0;
    for (const auto& [ptr, block] : kept_) {
      ++by_op[block.op][block.bytes];
      sum[block.op] += block.bytes;
      all += block.bytes;
    }
    std::vector<std::pair<int64_t, std::string>> order;
    for (const auto& [op, bytes] : sum) order.emplace_back(bytes, op);
    std::sort(order.rbegin(), order.rend());
    fmt::print("    live at the peak {:.1f} MiB, of which allocated before {:.1f}\n", kept_at_ / kMiB,
               static_cast<double>(kept_at_ - all) / kMiB);
    if (type_ == c10::DeviceType::CPU)
      fmt::print(
          "    glibc: arena {:.1f} MiB, mapped {:.1f}, in use {:.1f}, free in the heap {:.1f}, top {:.1f}\n",
          heap_.arena / kMiB, heap_.hblkhd / kMiB, heap_.uordblks / kMiB, heap_.fordblks / kMiB,
          heap_.keepcost / kMiB);
    for (const auto& [bytes, op] : order) {
      if (bytes < all / 500) break;
      std::string sizes;
      for (auto it = by_op[op].rbegin(); it != by_op[op].rend() && sizes.size() < 60; ++it)
        sizes += fmt::format(" {}x{:.2f}", it->second, static_cast<double>(it->first) / kMiB);
      fmt::print("    {:9.1f} MiB  {}  ({} )\n", static_cast<double>(bytes) / kMiB, op, sizes);
    }
  }

 private:
  struct Block {
    int64_t bytes;
    std::string op;
  };
  c10::DeviceType type_;
  std::mutex mutex_;
  bool named_ = false;
  int64_t live_ = 0, peak_ = 0, kept_at_ = 0;
  std::unordered_map<void*, Block> blocks_, kept_;
  struct mallinfo2 heap_ = {};
};

void run(const std::string& path, const std::vector<std::string>& overrides, bool cuda, bool blocks) {
  const c10::Device device = apply_device({.device = cuda ? "cuda" : "cpu"});
  const Recipe recipe = load_recipe(path, overrides);
  const RunData data = open_data(recipe);
  const ModelConfig config = resolve_model(recipe, data);
  const auto meter = std::make_shared<Meter>(device.type());
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
  const at::ScalarType dtype = recipe.train.dtype == TrainDtype::kBf16 ? at::kBFloat16 : at::kFloat;
  ModelWeights weights = init_weights(config, static_cast<uint64_t>(recipe.seed), device, dtype);
  if (recipe.train.recompute == Recompute::kBlock)
    ::mallopt(M_MMAP_THRESHOLD, 1 << 20);  // as the trainer does
  dist::Group group;
  TrainStep step(recipe, config, weights, device, group);
  set_requires_grad(config, weights, true);
  for (size_t i = 0; i < recipe.stages.size(); ++i) {
    const ModelConfig staged = stage_config(config, recipe.stages[i]);
    const auto loader = stage_loader(recipe, data, i);
    double seconds = 0;
    int64_t tensors = 0;
    for (int64_t n = 0; n < 2; ++n) {
      meter->restart(blocks && n == 1, tensors);
      const auto begin = std::chrono::steady_clock::now();
      step.run({.config = staged, .loader = *loader, .batch = n, .lr_multiplier = 0.1});
      seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      tensors = std::max(tensors, meter->peak());
    }
    const TrainMemory forecast = forecast_training(config, stage_shape(recipe, recipe.stages[i], device, 1));
    const double peak = peak_memory(device);
    fmt::print(
        "stage {}: context {}, {} tokens a step, {:.2f} s\n  tensors {:.1f} MiB, forecast {:.1f} ({:+.1f} "
        "%)\n",
        recipe.stages[i].name, recipe.stages[i].context, recipe.stages[i].batch_tokens, seconds,
        static_cast<double>(tensors) / kMiB, forecast.tensors() / kMiB,
        100 * (forecast.tensors() / static_cast<double>(tensors) - 1));
    fmt::print("  {} {:.1f} MiB so far, forecast {:.1f} ({:+.1f} %): {} at the {}\n",
               cuda ? "allocated" : "resident", peak / kMiB, forecast.total() / kMiB,
               100 * (forecast.total() / peak - 1), describe(forecast), forecast.moment);
    if (cuda) {
      const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
      fmt::print("  allocator: allocated peak {:.1f} MiB, reserved peak {:.1f}, active peak {:.1f}\n",
                 stats.allocated_bytes[0].peak / kMiB, stats.reserved_bytes[0].peak / kMiB,
                 stats.active_bytes[0].peak / kMiB);
    }
    if (blocks) meter->print_blocks();
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace godwit::cli

int main(int argc, char** argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  const auto flag = [&](const char* name) {
    const auto found = std::remove(words.begin(), words.end(), name);
    const bool given = found != words.end();
    words.erase(found, words.end());
    return given;
  };
  const bool cuda = flag("--cuda"), blocks = flag("--blocks");
  if (words.empty()) {
    std::fprintf(stderr, "usage: train_memory RECIPE [key=value]... [--cuda] [--blocks]\n");
    return 2;
  }
  if (blocks) at::addGlobalCallback(at::RecordFunctionCallback(godwit::cli::enter, godwit::cli::leave));
  try {
    godwit::cli::run(words[0], {words.begin() + 1, words.end()}, cuda, blocks);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "train_memory: %s\n", e.what());
    return 1;
  }
  return 0;
}
