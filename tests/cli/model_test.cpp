// inspect, logits and generate on a small model directory.
#include <gtest/gtest.h>

#include <limits>

#include "godwit/io/checkpoint_tensor.h"
#include "godwit/model/forward.h"
#include "tests/cli/program.h"
#include "tests/cli/tiny_directory.h"
#include "tests/support/compare.h"

namespace godwit {
namespace {

using test::Outcome;
using test::run;
using test::tiny_directory;
using test::TinyCopy;

TEST(Inspect, ModelDirectory) {
  const Outcome o = run({"inspect", tiny_directory(), "--json"});
  ASSERT_EQ(o.code, 0) << o.err;
  const nlohmann::json found = o.json();
  EXPECT_EQ(found["kind"], "model");
  EXPECT_EQ(found["config"]["layers"], 5);
  EXPECT_EQ(found["config"]["kda_layers"], 3);
  bool seen = false;
  uint64_t bytes = 0;
  for (const auto& group : found["tensors"]["groups"]) {
    bytes += group["bytes"].get<uint64_t>();
    if (group["name"] != "language_model.model.layers.*.block_sparse_moe.experts.*.w1.weight") continue;
    seen = true;
    EXPECT_EQ(group["count"], 4 * 12);
    EXPECT_EQ(group["dtype"], "F32");
    EXPECT_EQ(group["shape"], nlohmann::json({8, 16}));
  }
  EXPECT_TRUE(seen);
  EXPECT_EQ(found["tensors"]["bytes"], bytes);
  const Outcome text = run({"inspect", tiny_directory() + "/model.safetensors"});
  EXPECT_EQ(text.code, 0) << text.err;
  EXPECT_NE(text.out.find("self_attn.q_conv1d.weight"), std::string::npos);
}

TEST(Inspect, AConfigurationThatLinksToNothingIsAnError) {
  const TinyCopy copy;
  std::filesystem::remove(copy / "config.json");
  std::filesystem::create_symlink("nowhere.json", copy / "config.json");
  const Outcome o = run({"inspect", copy.path()});
  EXPECT_EQ(o.code, 1);
  EXPECT_NE(o.err.find("config.json"), std::string::npos) << o.err;
}

at::Tensor logits_of(const std::vector<std::string>& more, const std::string& ids) {
  const testing::ScratchDir dir;
  testing::put_file(dir / "ids.json", ids);
  std::vector<std::string> args = {"logits",         "--model", tiny_directory(),     "--tokens",
                                   dir / "ids.json", "--out",   dir / "l.safetensors"};
  args.insert(args.end(), more.begin(), more.end());
  const Outcome o = run(args);
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(o.out + o.err, "");
  const io::NamedTensors tensors = io::load_tensors(dir / "l.safetensors");
  EXPECT_EQ(tensors.size(), 1u);
  EXPECT_EQ(tensors.at(0).first, "logits");
  return tensors.at(0).second.clone();
}

TEST(Logits, SplitEqualsWholeEqualsLibrary) {
  const std::vector<int64_t> ids = {5, 17, 900, 2255, 3, 3, 64, 1000, 12, 77, 31};
  const std::string list = nlohmann::json(ids).dump();
  const at::Tensor whole = logits_of({}, list);
  ASSERT_EQ(whole.sizes(), at::IntArrayRef({11, test::directory_config().vocab_size}));
  ASSERT_EQ(whole.scalar_type(), at::kFloat);
  const at::Tensor split = logits_of({"--split", "4,1,1,5"}, list);
  EXPECT_TRUE(test::close(split, whole, test::kFp32Model));
  const ModelConfig config = load_model_config(tiny_directory());
  const ModelWeights weights = load_weights(config, tiny_directory(), at::kCPU, at::kFloat);
  const at::Tensor expected = forward_logits(
      config, weights, {.ids = at::tensor(ids, at::kLong), .cu_seqlens = make_cu_seqlens({11})});
  EXPECT_TRUE(test::close(whole, expected, test::kFp32Model));
}

TEST(Logits, FaultsNameTheFile) {
  const testing::ScratchDir dir;
  const auto fault = [&](const std::string& ids, std::vector<std::string> more, const std::string& part) {
    testing::put_file(dir / "ids.json", ids);
    std::vector<std::string> args = {"logits",         "--model", tiny_directory(),     "--tokens",
                                     dir / "ids.json", "--out",   dir / "l.safetensors"};
    args.insert(args.end(), more.begin(), more.end());
    const Outcome o = run(args);
    EXPECT_EQ(o.code, 1);
    EXPECT_EQ(o.err_lines(), 1);
    EXPECT_NE(o.err.find("ids.json"), std::string::npos) << o.err;
    EXPECT_NE(o.err.find(part), std::string::npos) << o.err;
    EXPECT_FALSE(std::filesystem::exists(dir / "l.safetensors"));
  };
  fault("{\"a\": 1}", {}, "list of token ids");
  fault("[1, 2, 999999]", {}, "entry 2");
  fault("[]", {}, "no token ids");
  fault("[1, 2, 3]", {"--split", "1,1"}, "2 tokens");
}

std::vector<std::string> generate(std::vector<std::string> more) {
  std::vector<std::string> args = {
      "generate", "--model", tiny_directory(), "--prompt", "In the beginning", "--max-tokens", "12"};
  args.insert(args.end(), more.begin(), more.end());
  return args;
}

TEST(Generate, JsonContractAndStream) {
  const Outcome o = run(generate({"--temperature", "0", "--json"}));
  ASSERT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(o.err, "");
  const nlohmann::json j = o.json();
  for (const char* key : {"text", "token_ids", "logprobs", "finish_reason", "prompt_tokens", "tokens_per_s"})
    EXPECT_TRUE(j.contains(key)) << key;
  EXPECT_LE(j["token_ids"].size(), 12u);
  EXPECT_EQ(j["token_ids"].size(), j["logprobs"].size());
  if (j["token_ids"].size() == 12) {
    EXPECT_EQ(j["finish_reason"], "length");
  }
  for (const auto& logprob : j["logprobs"]) EXPECT_LT(logprob.get<double>(), 0.0);
  const Outcome stream = run(generate({"--temperature", "0"}));
  EXPECT_EQ(stream.out, j["text"].get<std::string>() + "\n");
  EXPECT_EQ(stream.err, "");
}

TEST(Generate, SameSeedSameText) {
  const auto ids = [](const char* seed) {
    return run(generate({"--seed", seed, "--json"})).json()["token_ids"];
  };
  const auto first = ids("3");
  EXPECT_EQ(first, ids("3"));
  EXPECT_NE(first, ids("4"));
}

TEST(ModelDirectory, FaultsAreOneLineThatNamesTheFile) {
  const auto fault = [](const std::function<void(const TinyCopy&)>& damage, const std::string& part) {
    const TinyCopy copy;
    damage(copy);
    const Outcome o = run({"generate", "--model", copy.path(), "--prompt", "a"});
    EXPECT_EQ(o.code, 1);
    EXPECT_EQ(o.out, "");
    EXPECT_EQ(o.err_lines(), 1) << o.err;
    EXPECT_NE(o.err.find(copy.path()), std::string::npos) << o.err;
    EXPECT_NE(o.err.find(part), std::string::npos) << o.err;
  };
  fault([](const TinyCopy& c) { testing::put_file(c / "config.json", "{\"model_type\": "); }, "config.json");
  fault([](const TinyCopy& c) { std::filesystem::resize_file(c / "model.safetensors", 5000); },
        "model.safetensors");
  fault([](const TinyCopy& c) { std::filesystem::remove(c / "tiktoken.model"); }, "tiktoken.model");
  fault([](const TinyCopy& c) { std::filesystem::remove(c / "model.safetensors"); }, "safetensors");
}

TEST(Device, CudaThatIsNotThere) {
  if (at::globalContext().hasCUDA()) GTEST_SKIP() << "there is a GPU";
  const Outcome o = run(generate({"--device", "cuda"}));
  EXPECT_EQ(o.code, 1);
  EXPECT_NE(o.err.find("--device cuda"), std::string::npos) << o.err;
}

TEST(TokenizerCommand, TrainEncodeDecode) {
  const testing::ScratchDir dir;
  std::string text;
  for (int i = 0; i < 200; ++i) text += fmt::format("the {} sheep and the {} goats. ", i, i * i);
  testing::put_file(dir / "text.txt", text);
  const Outcome train =
      run({"tokenizer", "train", dir / "text.txt", "--out", dir / "tok", "--vocab-size", "300"});
  ASSERT_EQ(train.code, 0) << train.err;
  const Outcome encoded =
      run({"tokenizer", "encode", "--tokenizer", dir / "tok"}, "the sheep <|end_of_msg|>\n");
  ASSERT_EQ(encoded.code, 0) << encoded.err;
  const auto ids = encoded.json().get<std::vector<int32_t>>();
  for (const int32_t id : ids) EXPECT_LT(id, 300);
  const Outcome decoded = run({"tokenizer", "decode", "--tokenizer", dir / "tok"}, encoded.out);
  EXPECT_EQ(decoded.out, "the sheep <|end_of_msg|>\n");
  const Outcome special =
      run({"tokenizer", "encode", "--tokenizer", dir / "tok", "--specials", "<|end_of_msg|>"});
  EXPECT_EQ(special.json(), nlohmann::json({302}));
  const Outcome outside = run({"tokenizer", "decode", "--tokenizer", dir / "tok", "[556]"});
  EXPECT_EQ(outside.code, 1);
  EXPECT_NE(outside.err.find("556"), std::string::npos) << outside.err;
}

}  // namespace
}  // namespace godwit
