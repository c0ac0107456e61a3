// `godwit bench`: the ops timed on this machine, beside what they replace.
#include <nlohmann/json.hpp>

#include "bench/kda_timing.h"
#include "godwit/base/check.h"
#include "godwit/base/parallel.h"
#include "godwit/cli/commands.h"
#include "godwit/cli/support.h"

namespace godwit::cli {
namespace {

using nlohmann::json;

constexpr double kWidth = 128;

// Three products of 2 K V with the state, four triangles of 16 tokens.
double forward_flops(double rows) {
  return rows * (6 * kWidth * kWidth + 4 * 17 * kWidth);
}

// The least bytes a forward in bf16 moves: q, k, v, z, o and beta.
double forward_bytes(double rows) {
  return rows * 2 * (5 * kWidth + 1);
}

// Share of the copy bandwidth that work of this many bytes reaches.
double share(double bytes, double ms, double bandwidth) {
  return bytes / bandwidth * 1e3 / ms;
}

}  // namespace

int run_bench_kda(const BenchKdaArgs& args) {
  const c10::Device device = apply_device(args.device);
  check(args.tokens % args.sequences == 0, "--tokens {} is not a multiple of --sequences {}", args.tokens,
        args.sequences);
  const bench::KdaTimingCase c{
      .tokens = args.tokens, .heads = args.heads, .sequences = args.sequences, .device = device};
  // Token by token on a GPU is a matter of launches, and of many seconds.
  const bool recurrence = args.sequences == 1 && device.is_cpu();
  const bench::KdaTimes t = bench::time_kda(c, args.repeats, recurrence);
  const bench::KdaTimingCase step_case{.heads = args.heads, .sequences = 32, .device = device};
  const double step = bench::time_kda_step(step_case, args.repeats);
  const double rows = static_cast<double>(args.tokens * args.heads);
  json out = {{"device", device.str()},
              {"dtype", device.is_cpu() ? "f32" : "bf16"},
              {"threads", num_threads()},
              {"tokens", args.tokens},
              {"heads", args.heads},
              {"sequences", args.sequences},
              {"forward_ms", t.forward},
              {"forward_gflops", forward_flops(rows) / t.forward * 1e-6},
              {"forward_backward_ms", t.forward_backward},
              {"step_32_sequences_ms", step}};
  if (!device.is_cpu()) {  // a CPU is bound by arithmetic here, and its caches hold the inputs
    const double bandwidth = bench::copy_bandwidth(device);
    const double step_bytes = 32.0 * static_cast<double>(args.heads) * kWidth * kWidth * 8;
    out["copy_bytes_per_s"] = bandwidth;
    out["forward_share_of_floor"] = share(forward_bytes(rows), t.forward, bandwidth);
    out["step_share_of_floor"] = share(step_bytes, step, bandwidth);
  }
  if (t.recurrence > 0) {
    out["recurrence_ms"] = t.recurrence;
    out["recurrence_ratio"] = t.recurrence / t.forward;
  }
  if (args.json) {
    print_json(out);
    return 0;
  }
  print_out("KDA, {} tokens in {} sequence(s), {} heads of 128, {} on {}\n", args.tokens, args.sequences,
            args.heads, out["dtype"].get<std::string>(), device.str());
  print_out("  forward            {:>10.3f} ms   {:.0f} GFLOP/s\n", t.forward,
            out["forward_gflops"].get<double>());
  print_out("  forward, backward  {:>10.3f} ms\n", t.forward_backward);
  if (t.recurrence > 0)
    print_out("  token by token     {:>10.3f} ms   in ATen, forward: {:.1f} times ours\n", t.recurrence,
              t.recurrence / t.forward);
  print_out("  step, 32 sequences {:>10.4f} ms\n", step);
  if (!device.is_cpu())
    print_out(
        "  of the memory floor: forward {:.0f} %, step {:.0f} %, at a copy of {:.0f} GB/s, read and "
        "written\n",
        100 * out["forward_share_of_floor"].get<double>(), 100 * out["step_share_of_floor"].get<double>(),
        out["copy_bytes_per_s"].get<double>() * 1e-9);
  return 0;
}

}  // namespace godwit::cli
