#include "godwit/plan/plan.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "godwit/cli/commands.h"

namespace godwit::cli {
namespace {

std::string billions(double n) {
  return n >= 1e9 ? fmt::format("{:.2f} B", n / 1e9) : fmt::format("{:.2f} M", n / 1e6);
}

std::string bytes(double n) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  while (n >= 1024 && unit < 4) n /= 1024, ++unit;
  return fmt::format("{:.{}f} {}", n, unit == 0 ? 0 : 2, units[unit]);
}

}  // namespace

int run_plan(const PlanArgs& args) {
  const Plan plan = make_plan(load_model_config(args.model), args.context);
  const ParameterCount& p = plan.parameters;
  if (args.json) {
    const nlohmann::json out = {
        {"model", args.model},
        {"context", plan.context},
        {"parameters",
         {{"total", p.total},
          {"vision", p.vision},
          {"active", p.active},
          {"active_without_head", p.active_without_head},
          {"by_module", p.by_module}}},
        {"state",
         {{"kda_fp32_bytes", plan.state.kda_fp32},
          {"conv_bytes", plan.state.conv},
          {"mla_bf16_bytes_per_token", plan.state.mla_bf16_per_token}}},
        {"flops_per_token",
         {{"train", plan.flops.train}, {"prefill", plan.flops.prefill}, {"decode", plan.flops.decode}}},
        {"checkpoint_bytes", plan.checkpoint_bytes}};
    fmt::print("{}\n", out.dump());
    return 0;
  }
  fmt::print("{}\n  parameters            {:>20}  ({})\n", args.model, p.total,
             billions(static_cast<double>(p.total)));
  for (const auto& [module, count] : p.by_module) {
    fmt::print("    {:<20}{:>20}  {:5.2f} %\n", module, count,
               100.0 * static_cast<double>(count) / static_cast<double>(p.total));
  }
  fmt::print("  active a token        {:>20}  ({}; {} without the head)\n", p.active,
             billions(static_cast<double>(p.active)), billions(static_cast<double>(p.active_without_head)));
  fmt::print("  checkpoint            {:>20}\n", bytes(static_cast<double>(plan.checkpoint_bytes)));
  const double latent = static_cast<double>(plan.state.mla_bf16_per_token);
  fmt::print("  KDA state a sequence  {:>20}  fp32, any length (and {} of convolution tails)\n",
             bytes(static_cast<double>(plan.state.kda_fp32)), bytes(static_cast<double>(plan.state.conv)));
  fmt::print("  MLA cache a token     {:>20}  bf16 ({} at {} tokens)\n", bytes(latent),
             bytes(latent * static_cast<double>(args.context)), args.context);
  fmt::print(
      "  arithmetic a token    train {:.4g}, prefill {:.4g}, decode {:.4g} FLOP at {} tokens of context\n",
      plan.flops.train, plan.flops.prefill, plan.flops.decode, args.context);
  return 0;
}

}  // namespace godwit::cli
