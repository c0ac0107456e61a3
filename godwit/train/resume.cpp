#include "godwit/train/resume.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string_view>

namespace godwit {
namespace {

using Pairs = std::vector<std::pair<std::string, std::string>>;

Pairs flatten(Recipe recipe) {
  return flatten_fields([&](Fields& f) { visit(f, recipe); });
}

bool is_honoured(std::string_view key) {
  constexpr std::string_view kWhole[] = {"out",
                                         "tokenizer",
                                         "train.time_limit_s",
                                         "train.tensorboard",
                                         "train.nan_policy",
                                         "train.spike_policy",
                                         "train.spike_nats",
                                         "train.fault_limit"};
  constexpr std::string_view kBegins[] = {"checkpoint.", "eval.", "balance.alarm_", "dist."};
  return std::ranges::find(kWhole, key) != std::end(kWhole) ||
         std::ranges::any_of(kBegins, [&](std::string_view begin) { return key.starts_with(begin); }) ||
         (key.starts_with("stage.") && key.ends_with(".gate")) ||
         (key.starts_with("data.") &&
          (key.ends_with(".path") || key.ends_with(".name")));  // Run compares what lies there
}

}  // namespace

std::string RecipeChange::text() const {
  const auto shown = [](const std::string& value) { return value.empty() ? std::string("(none)") : value; };
  return fmt::format("{}: {} -> {}", key, shown(from), shown(to));
}

std::vector<RecipeChange> recipe_changes(const Recipe& from, const Recipe& to) {
  const Pairs before = flatten(from), after = flatten(to);
  const std::map<std::string, std::string> old(before.begin(), before.end());
  std::map<std::string, std::string> gone = old;
  std::vector<RecipeChange> changes;
  for (const auto& [key, value] : after) {
    gone.erase(key);
    const auto found = old.find(key);
    if (found != old.end() && found->second == value) continue;
    changes.push_back({.key = key,
                       .from = found == old.end() ? "" : found->second,
                       .to = value,
                       .honoured = is_honoured(key)});
  }
  for (const auto& [key, value] : gone)
    changes.push_back({.key = key, .from = value, .to = "", .honoured = is_honoured(key)});
  // A stage that came or went is refused as a whole, its gate included.
  if (from.stages.size() != to.stages.size()) {
    for (RecipeChange& change : changes)
      if (change.key.starts_with("stage.")) change.honoured = false;
  }
  return changes;
}

}  // namespace godwit
