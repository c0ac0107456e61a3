#include "godwit/cli/eval_tools.h"

#include <nlohmann/json.hpp>

#include "godwit/base/check.h"
#include "godwit/cli/support.h"
#include "godwit/rl/statistics.h"

namespace godwit::cli {
namespace {

using nlohmann::json;

json share(int64_t successes, int64_t of) {
  const rl::Interval i = rl::share_interval(successes, of);
  const double value = of > 0 ? static_cast<double>(successes) / static_cast<double>(of) : 0;
  return {{"share", value}, {"low", i.low}, {"high", i.high}, {"of", of}};
}

std::string text_of(const json& share) {
  return fmt::format("{:.3f} [{:.3f}, {:.3f}] of {}", share["share"].get<double>(),
                     share["low"].get<double>(), share["high"].get<double>(), share["of"].get<int64_t>());
}

}  // namespace

json eval_tools(const EvalArgs& args, const LoadedModel& model) {
  check(!args.environment.empty(),
        "eval tools: --environment names what the model acts in; docs/rl.md lists them");
  const auto options = json::parse(args.options_json, nullptr, /*allow_exceptions=*/false);
  check(options.is_object(), "--options: expected a JSON object");
  rl::RolloutOptions rollout;
  rollout.environments = {{.name = args.environment, .options = options.dump(), .weight = 1, .teacher = {}}};
  rollout.context = args.context;
  const rl::EpisodeStats s = rl::evaluate_policy(
      model, rollout,
      {.tasks = args.samples > 0 ? args.samples : 128, .temperature = args.temperature, .seed = args.seed});
  return {{"task", "tools"},
          {"environment", args.environment},
          {"options", options},
          {"seed", args.seed},
          {"temperature", args.temperature},
          {"tasks", s.episodes},
          {"success", share(s.solved, s.episodes)},
          {"recovery", share(s.recovered, s.faulted)},
          {"turn_reward", s.turn_reward},
          {"calls", s.calls},
          {"solved_calls", s.solved_calls},
          {"redundant", s.redundant},
          {"wrong", s.wrong},
          {"malformed", s.malformed},
          {"turns", s.turns},
          {"tokens", s.tokens}};
}

void print_tools(const json& r) {
  print_out("{}, {} tasks\n", r["environment"].get<std::string>(), r["tasks"].get<int64_t>());
  print_out("  success      {}\n", text_of(r["success"]));
  if (r["recovery"]["of"].get<int64_t>() > 0)
    print_out("  recovery     {} that met a failing tool\n", text_of(r["recovery"]));
  for (const char* key : {"turn_reward", "calls", "solved_calls", "redundant", "wrong", "turns", "tokens"})
    print_out("  {:<12} {:.2f}\n", key, r[key].get<double>());
}

}  // namespace godwit::cli
