#include "godwit/train/recipe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "godwit/base/check.h"

namespace godwit {
namespace {

using ::testing::HasSubstr;

constexpr const char* kFull = R"(# a recipe
out = "runs/x"
seed = 7
tokenizer = "tok"

[model]
name = "nano"
[model.override]
num_hidden_layers = 4
initializer_range = 0.5
attn_res_block_size = "null"
linear_attn_config = {num_heads = 2, kda_layers = [1, 2, 3]}

[[data]]
path = "data/bible"
[[data]]
path = "data/x"
name = "code \"quoted\""
weight = 0.25

[[stage]]
name = "short"
context = 128
sequences = 4
tokens = 5000
[[stage]]
context = 1024
batch_tokens = 2048
steps = 3
mix = {bible = 1, "code \"quoted\"" = 3.5}
gate = 0.05
window = 512
rope_base = 10000.0

[optimizer]
muon_lr = 1e-3
nesterov = false
[balance]
method = "sign"
[train]
dtype = "bf16"
recompute = "block"
nan_policy = "skip"
[eval]
data = ["data/held"]
)";

std::string error_of(const std::string& text, const std::vector<std::string>& overrides = {}) {
  try {
    parse_recipe(text, "r.toml", overrides);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

// kFull with one line replaced.
std::string with(const std::string& from, const std::string& to) {
  std::string text = kFull;
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(Recipe, ReadsEveryKindOfValue) {
  const Recipe r = parse_recipe(kFull, "r.toml");
  EXPECT_EQ(r.out, "runs/x");
  EXPECT_EQ(r.seed, 7);
  EXPECT_EQ(
      r.model.override_json,
      R"({"attn_res_block_size":null,"initializer_range":0.5,"linear_attn_config":{"kda_layers":[1,2,3],)"
      R"("num_heads":2},"num_hidden_layers":4})");
  ASSERT_EQ(r.data.size(), 2u);
  EXPECT_EQ(r.data[0].name, "bible");
  EXPECT_EQ(r.data[0].weight, 1);
  EXPECT_EQ(r.data[1].name, "code \"quoted\"");
  ASSERT_EQ(r.stages.size(), 2u);
  EXPECT_EQ(r.stages[0].batch_tokens, 512);
  EXPECT_EQ(r.stages[0].steps, 10);  // 5000 tokens, rounded up to whole batches
  EXPECT_TRUE(std::isinf(r.stages[0].gate));
  EXPECT_EQ(r.stages[1].name, "stage1");
  EXPECT_EQ(r.stages[1].mix.at("code \"quoted\""), 3.5);
  EXPECT_FALSE(r.optimizer.nesterov);
  EXPECT_EQ(r.optimizer.weight_decay, 0.1);
  EXPECT_EQ(r.balance.method, BalanceMethod::kSign);
  EXPECT_EQ(r.train.dtype, TrainDtype::kBf16);
  EXPECT_EQ(r.train.recompute, Recompute::kBlock);
  EXPECT_EQ(r.train.nan_policy, FaultPolicy::kSkip);
  EXPECT_EQ(r.eval.data, std::vector<std::string>{"data/held"});
}

TEST(Recipe, ResolvedRecipeReadsBackEqual) {
  Recipe r = parse_recipe(kFull, "r.toml");
  r.optimizer.muon_lr = 0.1 + 0.2;  // needs all 17 digits
  r.tokenizer = "a\nb\x01\\ \"é\"";
  const std::string text = to_toml(r);
  EXPECT_EQ(parse_recipe(text, "other.toml"), r) << text;
  EXPECT_EQ(to_toml(parse_recipe(text, "other.toml")), text);
}

TEST(Recipe, RunDirectoryDefaultsToTheRecipesName) {
  EXPECT_EQ(parse_recipe(with("out = \"runs/x\"\n", ""), "configs/recipes/tiny.toml").out, "runs/tiny");
}

TEST(Recipe, OverridesTakeDottedPathsAndIndices) {
  const Recipe r = parse_recipe(kFull, "r.toml",
                                {"stage.1.steps=11", "out=runs/elsewhere", "optimizer.muon_lr=3e-4",
                                 "checkpoint.every=5", "model.override.num_experts=16", "train.minutes=2",
                                 "eval.data=[\"a\",\"b\"]", "stage.1.mix={bible=1}", "data.1.path=data/y"});
  EXPECT_EQ(r.stages[1].steps, 11);
  EXPECT_EQ(r.out, "runs/elsewhere");
  EXPECT_EQ(r.optimizer.muon_lr, 3e-4);
  EXPECT_EQ(r.checkpoint.every, 5);
  EXPECT_THAT(r.model.override_json, HasSubstr("\"num_experts\":16"));
  EXPECT_EQ(r.train.minutes, 2);
  EXPECT_EQ(r.eval.data.size(), 2u);
  EXPECT_EQ(r.stages[1].mix.size(), 1u);
}

TEST(Recipe, ErrorsNameFileLineAndKey) {
  EXPECT_THAT(error_of(with("seed = 7", "sed = 7")), HasSubstr("r.toml:3: sed: unknown key; known here: "));
  EXPECT_THAT(error_of(with("nesterov = false", "nesterov = 1")),
              HasSubstr("r.toml:37: optimizer.nesterov: expected true or false, got an integer"));
  EXPECT_THAT(
      error_of(with("method = \"sign\"", "method = \"sgn\"")),
      HasSubstr("r.toml:39: balance.method: expected one of quantile, sign, aux_loss, none, got \"sgn\""));
  EXPECT_THAT(error_of(with("steps = 3", "steps = 3.5")),
              HasSubstr("r.toml:29: stage.1.steps: expected an integer, got a number with a point"));
  EXPECT_THAT(error_of(with("weight = 0.25", "weight = -1")),
              HasSubstr("r.toml:19: data.1.weight: expected a number of at least 0, got -1"));
  EXPECT_THAT(error_of(with("batch_tokens = 2048", "batch_tokens = 2000")),
              HasSubstr("r.toml:28: stage.1.batch_tokens: expected a multiple of context 1024, got 2000"));
  EXPECT_THAT(error_of(with("mix = {bible = 1,", "mix = {bibel = 1,")),
              HasSubstr("r.toml:30: stage.1.mix.bibel: there is no dataset \"bibel\""));
  EXPECT_THAT(error_of(with("seed = 7", "seed = ")), HasSubstr("r.toml:3: "));
  EXPECT_THAT(error_of(with("[train]", "[trian]")), HasSubstr("r.toml:40: trian: unknown key"));
  EXPECT_THAT(error_of(with("window = 512", "windw = 512")),
              HasSubstr("r.toml:32: stage.1.windw: unknown key"));
  EXPECT_THAT(error_of(with("muon_lr = 1e-3", "beta1 = 1.0")),
              HasSubstr("optimizer.beta1: expected a number below 1"));
  EXPECT_THAT(error_of(with("muon_lr = 1e-3", "muon_lr = nan")), HasSubstr("optimizer.muon_lr: expected"));
}

TEST(Recipe, OnlyStringsAndCommentsHoldOtherThanAscii) {
  const std::string good = "# gr\xC3\xBCn\n" + std::string(kFull) + "\n# \xEF\xBB\xBD '\n";
  EXPECT_EQ(parse_recipe(good, "r.toml"), parse_recipe(kFull, "r.toml"));
  EXPECT_THAT(error_of(good + "\xEF\xBB\xBD"), HasSubstr("r.toml:"));
  EXPECT_THAT(error_of("x = 'a' \xC3\xBC"), HasSubstr("r.toml:1: "));
  EXPECT_THAT(error_of("x = \"\"\"a \xC3\xBC\n\"\"\" \xC3\xBC"), HasSubstr("r.toml:2: "));
}

TEST(Recipe, ErrorsOfOverridesNameTheOverride) {
  EXPECT_THAT(error_of(kFull, {"stage.0.steps=many"}),
              HasSubstr("--set stage.0.steps=many: stage.0.steps: expected an integer, got a string"));
  EXPECT_THAT(error_of(kFull, {"stage.2.steps=1"}), HasSubstr("expected an index below 2, got 2"));
  EXPECT_THAT(error_of(kFull, {"stage.first.steps=1"}), HasSubstr("expected an index below 2, got first"));
  EXPECT_THAT(error_of(kFull, {"optimizer.lr=1"}),
              HasSubstr("--set optimizer.lr=1: optimizer.lr: unknown key"));
  EXPECT_THAT(error_of(kFull, {"stage.1.mix.bibel=1"}),
              HasSubstr("--set stage.1.mix.bibel=1: stage.1.mix.bibel: there is no dataset"));
  EXPECT_THAT(error_of(kFull, {"model.override.hidden_sise=64"}),
              HasSubstr("--set model.override.hidden_sise=64: model.override.hidden_sise: no key of"));
  EXPECT_THAT(error_of(kFull, {"seed.x=1"}), HasSubstr("there is nothing below an integer"));
  EXPECT_THAT(error_of(kFull, {"seed"}), HasSubstr("--set seed: expected key=value"));
}

TEST(Recipe, RefusesWhatCannotRun) {
  EXPECT_THAT(error_of(with("name = \"nano\"\n", "")), HasSubstr("model: is missing"));
  EXPECT_THAT(error_of(kFull, {"init=runs/a/model"}), HasSubstr("give model.name or init, not both"));
  EXPECT_EQ(error_of(with("name = \"nano\"\n", ""), {"init=runs/a/model"}), "no error");
  EXPECT_THAT(error_of(kFull, {"stage.0.steps=10"}), HasSubstr("give steps or tokens, not both"));
  EXPECT_THAT(error_of(with("context = 128\n", "")), HasSubstr("stage.0.context: is missing"));
  EXPECT_THAT(error_of(with("name = \"code \\\"quoted\\\"\"", "name = \"bible\"")),
              HasSubstr("two datasets are called"));
  EXPECT_THAT(error_of(kFull, {"stage.1.mix={bible=0}"}), HasSubstr("sum to 0"));
  EXPECT_THAT(error_of(kFull, {"stage.1.time_share=0.5"}),
              HasSubstr("give every stage a time_share, or none"));
  EXPECT_THAT(error_of(kFull, {"stage.0.time_share=0.5", "stage.1.time_share=0.25"}),
              HasSubstr("must sum to 1"));
  EXPECT_THAT(error_of(kFull, {"train.micro_batch_tokens=64"}),
              HasSubstr("64 tokens are less than a sequence of stage"));
  // Counts of tokens that would not fit 64 bits, and rates that are no numbers.
  EXPECT_THAT(error_of(kFull, {"stage.1.steps=9223372036854775807"}), HasSubstr("a number from 0 to"));
  EXPECT_THAT(error_of(kFull, {"stage.1.batch_tokens=0", "stage.1.sequences=1099511627776"}),
              HasSubstr("stage.1.sequences: 1099511627776 of context 1024 are more than"));
  EXPECT_THAT(error_of(kFull, {"stage.1.steps=1000000000", "stage.1.batch_tokens=1099511627776"}),
              HasSubstr("the stages have 1.1e+21 tokens"));
  EXPECT_THAT(error_of(kFull, {"optimizer.muon_lr=inf"}), HasSubstr("got inf"));
  EXPECT_EQ(error_of(kFull, {"stage.1.gate=inf"}), "no error");
  EXPECT_THROW(load_recipe("/nonexistent/recipe.toml"), Error);
}

TEST(Recipe, EveryTrainingRecipeOfTheProjectLoads) {
  int loaded = 0;
  for (const auto& entry : std::filesystem::directory_iterator(GODWIT_SOURCE_DIR "/configs/recipes")) {
    if (entry.path().filename().string().starts_with("rl-")) continue;  // another kind of run
    const Recipe recipe = load_recipe(entry.path().string());
    EXPECT_EQ(parse_recipe(to_toml(recipe), "resolved.toml"), recipe) << entry.path();
    ++loaded;
  }
  EXPECT_GT(loaded, 0);
}

TEST(Recipe, DocumentationNamesEveryKey) {
  std::ifstream file(std::string(GODWIT_SOURCE_DIR) + "/docs/training.md");
  std::stringstream text;
  text << file.rdbuf();
  Recipe recipe;
  for (const std::string& key : list_fields([&](Fields& f) { visit(f, recipe); }))
    EXPECT_THAT(text.str(), HasSubstr("| `" + key + "` |"));
}

}  // namespace
}  // namespace godwit
