#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "godwit/base/file.h"
#include "godwit/cli/commands.h"
#include "godwit/cli/memory.h"
#include "godwit/cli/support.h"
#include "godwit/data/dataset.h"
#include "godwit/dist/group.h"
#include "godwit/io/compressed_size.h"
#include "godwit/train/setup.h"
#include "godwit/train/trainer.h"

namespace godwit::cli {
namespace {

std::string duration(double seconds) {
  const auto whole = static_cast<int64_t>(seconds + 0.5);
  return whole < 60 ? fmt::format("{} s", whole) : fmt::format("{} min {:02} s", whole / 60, whole % 60);
}

// Bits a byte of `zstd -19` on the held-out text beside the packed data; 0 where there is none.
double zstd_bits_per_byte(const Recipe& recipe) {
  for (const DatasetOptions& dataset : recipe.data) {
    const std::filesystem::path path = std::filesystem::path(dataset.path) / "heldout.txt";
    if (!std::filesystem::exists(path)) continue;
    const std::string text = read_file(path);
    if (!text.empty())
      return 8.0 * static_cast<double>(io::zstd_size(text, 19)) / static_cast<double>(text.size());
  }
  return 0.0;
}

void print_positions(const HeldOutLoss& held) {
  print_out("\n  loss by position at context {} (nats a token)\n", held.context);
  double largest = 0;
  for (const LossByPosition::Bucket& p : held.by_position) largest = std::max(largest, p.nats);
  for (const LossByPosition::Bucket& p : held.by_position) {
    const auto bar = static_cast<size_t>(40.0 * p.nats / largest + 0.5);
    print_out("  {:>7} to {:<7} {:6.3f}  {}\n", p.begin, p.end - 1, p.nats, std::string(bar, '#'));
  }
}

void print_summary(const Recipe& recipe, const RunSummary& s) {
  print_out("\n{}: {} steps, {} tokens in {} ({:.0f} tokens/s), {:.2f} M parameters\n\n", recipe.out, s.steps,
            s.tokens, duration(s.seconds), static_cast<double>(s.tokens) / s.seconds,
            static_cast<double>(s.parameters) * 1e-6);
  print_out("  {:<12} {:>8} {:>7} {:>10} {:>11} {:>8}   {}\n", "stage", "context", "steps", "tokens", "time",
            "loss", "gate: held-out loss at the context before");
  for (const StageSummary& stage : s.stages) {
    const std::string gate =
        stage.gate_before > 0 ? fmt::format("{:.3f} -> {:.3f}", stage.gate_before, stage.gate_after) : "";
    print_out("  {:<12} {:>8} {:>7} {:>10} {:>11} {:>8.3f}   {}\n", stage.name, stage.context, stage.steps,
              stage.tokens, duration(stage.seconds), stage.loss, gate);
  }
  if (s.after.tokens > 0) {
    print_out("\n  held-out bits per byte    before {:.3f}   after {:.3f} at context {}, {:.3f} at {}",
              s.before.bits_per_byte, s.after.bits_per_byte, s.after.context, s.longest.bits_per_byte,
              s.longest.context);
    const double zstd = zstd_bits_per_byte(recipe);
    if (zstd > 0) print_out("   zstd -19 {:.3f}", zstd);
    print_out("\n");
  }
  print_out(
      "  expert balance            MaxVio {:.2f} at the first step, {:.2f} over the last; dead experts {}\n",
      s.first_max_vio, s.last_max_vio, s.dead_experts);
  if (!s.longest.by_position.empty()) print_positions(s.longest);
  if (!s.finished) print_out("\n  stopped before the end; --resume goes on\n");
}

// Refuses a run that cannot fit, before its memory is taken.
RunForecast forecast(const Recipe& recipe, const TrainArgs& args, at::Device device,
                     const dist::Launch& launch) {
  const RunData data = open_data(recipe);
  const ModelConfig config = resolve_model(recipe, data);
  const RunForecast run = forecast_run(recipe, config, device, launch.size, &data);
  // torchrun says how many processes share this host's memory.
  const char* here = std::getenv("LOCAL_WORLD_SIZE");
  const double sharing = device.is_cpu() && here != nullptr ? std::max(1.0, std::atof(here)) : 1.0;
  if (!args.no_memory_check) check_memory(run, config, available_memory(device) / sharing);
  return run;
}

void print_memory(const RunForecast& forecast, at::Device device) {
  const double peak = peak_memory(device), expected = forecast.memory.total();
  if (peak <= 0) return;
  print_out("\n  peak memory               {} {}, forecast {} ({:+.1f} %, stage {})\n", human_bytes(peak),
            device.is_cpu() ? "resident" : "allocated on the device", human_bytes(expected),
            100 * (expected / peak - 1), forecast.stage);
}

}  // namespace

int run_train(const TrainArgs& args) {
  const Recipe recipe = load_recipe(args.recipe, args.overrides);
  const dist::Launch launch = dist::launch_from_environment();
  const c10::Device device = apply_device(args.device, launch.local_rank);
  const RunForecast expected = forecast(recipe, args, device, launch);
  dist::Group group(launch, device, recipe.dist.timeout_s);
  const RunSummary summary = run_training(recipe, {.device = device, .resume = args.resume, .group = &group});
  if (launch.rank != 0) return 0;
  print_summary(recipe, summary);
  print_memory(expected, device);
  return 0;
}

}  // namespace godwit::cli
