// `godwit convert IN OUT`: a checkpoint in another type or layout.
#include "godwit/model/convert.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>

#include "godwit/base/progress.h"
#include "godwit/cli/commands.h"
#include "godwit/cli/support.h"

namespace godwit::cli {

int run_convert(const ConvertArgs& args) {
  ConvertOptions options{.shard_bytes = args.shard_bytes};
  if (args.dtype == "bf16") options.dtype = ConvertDtype::kBf16;
  if (args.dtype == "f32") options.dtype = ConvertDtype::kF32;
  if (args.dtype == "mxfp4") options.dtype = ConvertDtype::kMxfp4;
  if (!args.layout.empty()) options.model_type = args.layout == "kimi-linear" ? "kimi_linear" : "kimi_k3";
  if (!args.scales_from.empty()) options.scales_from = args.scales_from;
  if (args.threads > 0) apply_device({.device = "cpu", .threads = args.threads});

  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  std::optional<ProgressBar> bar;
  options.progress = [&](uint64_t done, uint64_t total) {
    constexpr uint64_t kUnit = 1 << 10;
    if (!bar) bar.emplace(ProgressOptions{.label = "KiB", .total = static_cast<int64_t>(total / kUnit)});
    bar->update(static_cast<int64_t>(done / kUnit),
                fmt::format("{:.2f} GB/s", static_cast<double>(done) / 1e9 / seconds()));
  };
  const ConvertSummary summary = convert_checkpoint(args.in, args.out, options);
  if (bar) bar->finish();
  print_out("{}: {} tensors in {} files, {}{}; {} tensors read\n", args.out, summary.tensors_out,
            summary.files, human_bytes(static_cast<double>(summary.bytes)),
            summary.packed ? ", experts in MXFP4" : "", summary.tensors_in);
  if (summary.vision > 0)
    print_out("{} tensors of the vision tower and projector: copied through\n", summary.vision);
  if (summary.left_out > 0)
    print_out("{} tensors of the vision tower and projector: left out, this layout has no place for them\n",
              summary.left_out);
  if (!summary.keys_left_out.empty())
    print_out("left out of config.json, as they say nothing in this layout: {}\n",
              fmt::join(summary.keys_left_out, ", "));
  return 0;
}

}  // namespace godwit::cli
