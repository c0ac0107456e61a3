// `godwit plan`: what a model costs, from its configuration alone.
#include "godwit/plan/plan.h"

#include <nlohmann/json.hpp>

#include "godwit/cli/commands.h"
#include "godwit/cli/support.h"

namespace godwit::cli {

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
    print_json(out);
    return 0;
  }
  print_out("{}\n  parameters            {:>20}  ({})\n", args.model, p.total,
            human_count(static_cast<double>(p.total)));
  for (const auto& [module, count] : p.by_module) {
    print_out("    {:<20}{:>20}  {:5.2f} %\n", module, count,
              100.0 * static_cast<double>(count) / static_cast<double>(p.total));
  }
  print_out("  active a token        {:>20}  ({}; {} without the head)\n", p.active,
            human_count(static_cast<double>(p.active)),
            human_count(static_cast<double>(p.active_without_head)));
  print_out("  checkpoint            {:>20}\n", human_bytes(static_cast<double>(plan.checkpoint_bytes)));
  const double latent = static_cast<double>(plan.state.mla_bf16_per_token);
  print_out("  KDA state a sequence  {:>20}  fp32, any length (and {} of convolution tails)\n",
            human_bytes(static_cast<double>(plan.state.kda_fp32)),
            human_bytes(static_cast<double>(plan.state.conv)));
  print_out("  MLA cache a token     {:>20}  bf16 ({} at {} tokens)\n", human_bytes(latent),
            human_bytes(latent * static_cast<double>(args.context)), args.context);
  print_out(
      "  arithmetic a token    train {:.4g}, prefill {:.4g}, decode {:.4g} FLOP at {} tokens of context\n",
      plan.flops.train, plan.flops.prefill, plan.flops.decode, args.context);
  return 0;
}

}  // namespace godwit::cli
