// convert and inspect on Kimi K3's released layout and on a training checkpoint.
#include <gtest/gtest.h>

#include "godwit/io/checkpoint_tensor.h"
#include "tests/cli/program.h"
#include "tests/cli/tiny_directory.h"
#include "tests/support/compare.h"

namespace godwit {
namespace {

using test::Outcome;
using test::run;
using testing::ScratchDir;

const std::string kK3 = GODWIT_FIXTURES "/k3";

at::Tensor logits(const std::string& model, const std::string& dtype = "f32") {
  const ScratchDir dir;
  testing::put_file(dir / "ids.json", "[1, 5, 9, 70, 3, 3, 64]");
  const Outcome o = run({"logits", "--model", model, "--tokens", dir / "ids.json", "--out",
                         dir / "l.safetensors", "--dtype", dtype});
  EXPECT_EQ(o.code, 0) << o.err;
  return io::load_tensors(dir / "l.safetensors").at(0).second.clone();
}

TEST(Inspect, KimiK3Layout) {
  const nlohmann::json found = run({"inspect", kK3, "--json"}).json();
  EXPECT_EQ(found["tensors"]["count"], 190);
  EXPECT_EQ(found["fit"]["complete"], true);
  EXPECT_EQ(found["fit"]["experts"], "mxfp4");
  EXPECT_EQ(found["fit"]["vision"], 12);
  const Outcome text = run({"inspect", kK3});
  EXPECT_NE(text.out.find("routed experts in MXFP4; 12 of the vision tower"), std::string::npos) << text.out;
}

TEST(Inspect, SaysWhatDoesNotFit) {
  const ScratchDir dir;
  std::filesystem::copy(kK3, dir / "k3");
  std::string config = read_file(dir / "k3/config.json");
  const std::string from = "\"moe_intermediate_size\": 32";
  config.replace(config.find(from), from.size(), "\"moe_intermediate_size\": 64");
  testing::put_file(dir / "k3/config.json", config);
  const nlohmann::json found = run({"inspect", dir / "k3", "--json"}).json();
  EXPECT_EQ(found["fit"]["complete"], false);
  EXPECT_NE(found["fit"]["differences"].get<std::string>().find("of another shape: "), std::string::npos);
  const Outcome refused = run({"convert", dir / "k3", dir / "out"});
  EXPECT_EQ(refused.code, 1);
  EXPECT_EQ(refused.err_lines(), 1) << refused.err;
  EXPECT_NE(refused.err.find("do not fit config.json"), std::string::npos) << refused.err;
}

TEST(Inspect, Picture) {
  const nlohmann::json found = run({"inspect", GODWIT_FIXTURES "/images/turned.jpg", "--json"}).json();
  EXPECT_EQ(found["kind"], "image");
  EXPECT_EQ(found["width"], 61);
  EXPECT_EQ(found["tokens"], 6);
}

TEST(Convert, ThereAndBackWithTheSameLogits) {
  const ScratchDir dir;
  const at::Tensor expected = logits(kK3);
  const Outcome first = run({"convert", kK3, dir / "bf16", "--dtype", "bf16"});
  ASSERT_EQ(first.code, 0) << first.err;
  EXPECT_NE(first.out.find("12 tensors of the vision tower and projector: copied through"),
            std::string::npos);
  const Outcome second = run({"convert", dir / "bf16", dir / "mxfp4", "--dtype", "mxfp4", "--scales-from",
                              kK3, "--shard-size", "1KB"});
  ASSERT_EQ(second.code, 0) << second.err;
  EXPECT_TRUE(test::bit_equal(logits(dir / "bf16"), expected));
  EXPECT_TRUE(test::bit_equal(logits(dir / "mxfp4"), expected));
  for (const char* file : {"model-00003-of-000007.safetensors", "model-00007-of-000007.safetensors"})
    EXPECT_TRUE(std::filesystem::exists(dir / "mxfp4" / file)) << file;
}

// Packed experts serve generation: the same text as the weights that they stand for.
TEST(Convert, GeneratesFromMxfp4) {
  const ScratchDir dir;
  ModelConfig config = test::directory_config();
  config.moe.latent = 32;
  config.moe.inner = 32;
  config.dtype = "bfloat16";
  ModelWeights weights = init_weights(config, 7, at::kCPU, at::kFloat);
  std::filesystem::create_directory(dir / "bf16");
  save_weights(config, weights, dir / "bf16");
  Tokenizer::load(GODWIT_FIXTURES "/tokenizer").save(dir / "bf16");
  ASSERT_EQ(run({"convert", dir / "bf16", dir / "mxfp4", "--dtype", "mxfp4"}).code, 0);
  ASSERT_EQ(run({"convert", dir / "mxfp4", dir / "unpacked", "--dtype", "bf16"}).code, 0);
  const auto text = [&](const std::string& model) {
    const Outcome o = run({"generate", "--model", dir / model, "--prompt", "In the beginning", "--max-tokens",
                           "8", "--temperature", "0", "--json"});
    EXPECT_EQ(o.code, 0) << o.err;
    nlohmann::json found = o.json();
    found.erase("tokens_per_s");
    return found;
  };
  EXPECT_EQ(text("mxfp4"), text("unpacked"));
}

TEST(Convert, UsageAndFaults) {
  const ScratchDir dir;
  EXPECT_EQ(run({"convert", kK3}).code, 2);
  EXPECT_EQ(run({"convert", kK3, dir / "out", "--dtype", "f16"}).code, 2);
  const Outcome absent = run({"convert", dir / "no", dir / "out"});
  EXPECT_EQ(absent.code, 1);
  EXPECT_EQ(absent.err_lines(), 1) << absent.err;
  EXPECT_EQ(dir.entries(), 0);
}

// A run's checkpoint becomes a model directory: the one that the run writes at its end, if nothing came
// after.
TEST(Convert, TrainingCheckpoint) {
  const ScratchDir dir;
  const std::string fixtures = GODWIT_FIXTURES "/tiny";
  std::vector<std::string> args = {"train", GODWIT_SOURCE_DIR "/configs/recipes/tiny-smoke.toml"};
  for (const std::string& value : {"out=" + (dir / "run").string(), "data.0.path=" + fixtures + "/data",
                                   "tokenizer=" + fixtures + "/tokenizer", std::string("stage.0.steps=2"),
                                   std::string("stage.1.steps=1")}) {
    args.push_back("--set");
    args.push_back(value);
  }
  const Outcome train = run(args);
  ASSERT_EQ(train.code, 0) << train.err;
  std::filesystem::path newest;
  for (const auto& entry : std::filesystem::directory_iterator(dir / "run/checkpoints"))
    newest = std::max(newest, entry.path(), [](const auto& a, const auto& b) {
      const std::string x = a.filename(), y = b.filename();
      return std::pair(x.size(), x) < std::pair(y.size(), y);
    });
  const nlohmann::json found = run({"inspect", newest, "--json"}).json();
  EXPECT_EQ(found["kind"], "checkpoint");
  const Outcome convert = run({"convert", newest, dir / "model"});
  ASSERT_EQ(convert.code, 0) << convert.err;
  EXPECT_TRUE(test::bit_equal(logits(dir / "model"), logits(dir / "run/model")));
  EXPECT_TRUE(std::filesystem::exists(dir / "model/tiktoken.model"));
}

}  // namespace
}  // namespace godwit
