// What a run refuses before its first step.
#include "godwit/train/setup.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "godwit/base/check.h"

namespace godwit {
namespace {

using ::testing::HasSubstr;

Recipe tiny_recipe(const std::vector<std::string>& more) {
  const std::string fixtures = std::string(GODWIT_FIXTURES) + "/tiny";
  std::vector<std::string> set = {"data.0.path=" + fixtures + "/data",
                                  "tokenizer=" + fixtures + "/tokenizer"};
  set.insert(set.end(), more.begin(), more.end());
  return load_recipe(std::string(GODWIT_SOURCE_DIR) + "/configs/recipes/tiny-smoke.toml", set);
}

std::string error_of(const std::vector<std::string>& set) {
  try {
    const Recipe recipe = tiny_recipe(set);
    resolve_model(recipe, open_data(recipe));
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

TEST(Setup, TheTokenizerIsTheOneThatPackedTheData) {
  EXPECT_EQ(error_of({}), "no error");
  EXPECT_THAT(error_of({"tokenizer=/nonexistent"}), HasSubstr("tokenizer /nonexistent: no such directory"));
  EXPECT_THAT(error_of({std::string("tokenizer=") + GODWIT_FIXTURES + "/tokenizer"}),
              HasSubstr("tiny/data/train was packed with another one"));
}

TEST(Setup, ImpossibleOverridesAreSaidToBeTheRecipes) {
  EXPECT_THAT(
      error_of({"model.override.hidden_size=-64"}),
      HasSubstr("nano with the recipe's model.override: text_config: 'hidden_size' must be positive"));
  EXPECT_THAT(error_of({"model.override.vocab_size=4096"}),
              HasSubstr("model.override.vocab_size is 4096, but the data's tokenizer has"));
}

}  // namespace
}  // namespace godwit
