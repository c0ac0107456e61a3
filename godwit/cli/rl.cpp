#include "godwit/base/log.h"
#include "godwit/cli/commands.h"
#include "godwit/cli/memory.h"
#include "godwit/cli/support.h"
#include "godwit/rl/loop.h"

namespace godwit::cli {
namespace {

void print_arm(const char* name, const rl::EpisodeStats& s) {
  const rl::Interval success = rl::share_interval(s.solved, s.episodes);
  const rl::Interval recovery = rl::share_interval(s.recovered, s.faulted);
  print_out("  {:<8} {:>6} {:>9.3f} [{:.3f}, {:.3f}] {:>9.3f} [{:.3f}, {:.3f}] {:>8} {:>7.2f} {:>8.1f}\n",
            name, s.episodes, s.success, success.low, success.high, s.recovery(), recovery.low, recovery.high,
            s.faulted, s.calls, s.tokens);
}

}  // namespace

int run_rl(const RlArgs& args) {
  const rl::RlRecipe recipe = rl::load_rl_recipe(args.recipe, args.overrides);
  const at::Device device = apply_device(args.device);
  const rl::RlSummary s = rl::run_rl(recipe, {.device = device, .resume = args.resume});
  print_out(
      "\n{}: {} steps in {:.0f} s, largest |dlogp| between rollout and trainer {:g}, peak memory {}\n\n",
      recipe.out, s.steps, s.seconds, s.max_dlogp, human_bytes(peak_memory(device)));
  if (s.after.episodes > 0) {
    print_out("  {:<8} {:>6} {:>9} {:^16} {:>9} {:^16} {:>8} {:>7} {:>8}\n", "", "tasks", "success", "95 %",
              "recovery", "95 %", "faulted", "calls", "tokens");
    print_arm("before", s.before);
    print_arm("after", s.after);
  }
  if (!s.finished) print_out("  stopped before the end; --resume goes on\n");
  return 0;
}

}  // namespace godwit::cli
