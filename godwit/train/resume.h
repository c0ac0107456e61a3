// What a resumed run may change in its recipe.
#pragma once

#include <string>
#include <vector>

#include "godwit/train/recipe.h"

namespace godwit {

struct RecipeChange {
  std::string key;       // dotted: stage.0.gate
  std::string from, to;  // as TOML; empty where a recipe does not have the key
  // The run goes on as if it had always had this value: places, how often to save and to measure, limits,
  // alarms. Everything else decides the numbers, and a run that had changed them half-way would be nobody's
  // recipe.
  bool honoured = false;
  std::string text() const;  // `key: from -> to`
};

// Keys whose values differ, in the recipe's order.
std::vector<RecipeChange> recipe_changes(const Recipe& from, const Recipe& to);

}  // namespace godwit
