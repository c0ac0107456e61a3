// train/recipe: any text as a recipe. What is accepted must be written as a recipe equal to it.
#include "godwit/train/recipe.h"

#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace godwit;
  Recipe recipe;
  if (!fuzz::accepts([&] { recipe = parse_recipe(fuzz::text(data, size), "recipe.toml"); })) return 0;
  fuzz::require(parse_recipe(to_toml(recipe), "written recipe.toml") == recipe);
  return 0;
}
