// Pictures on the command line: logits, generate, chat, eval vision.
#include <gtest/gtest.h>

#include "godwit/io/checkpoint_tensor.h"
#include "godwit/model/vision.h"
#include "tests/cli/program.h"
#include "tests/cli/tiny_directory.h"
#include "tests/support/compare.h"

namespace godwit {
namespace {

using test::Outcome;
using test::run;

const std::string kPicture = GODWIT_FIXTURES "/images/exact.png";  // 56 x 28: two tokens

// The tiny model with a tower; made once.
const std::string& seeing_directory() {
  static const testing::ScratchDir dir;
  static const std::string path = [] {
    ModelConfig config = test::directory_config();
    const Tokenizer tokenizer = Tokenizer::load(GODWIT_FIXTURES "/tokenizer");
    config.media_id = tokenizer.special_id(kMediaPad);
    config.vision = VisionConfig{.pos_emb_height = 4,
                                 .pos_emb_width = 4,
                                 .layers = 1,
                                 .hidden = 16,
                                 .intermediate = 24,
                                 .heads = 2,
                                 .qkv_hidden = 16};
    ModelWeights weights = init_weights(config, 7, at::kCPU, at::kFloat);
    save_weights(config, weights, dir.path());
    tokenizer.save(dir.path());
    return dir.path().string();
  }();
  return path;
}

int64_t pad() {
  return Tokenizer::load(GODWIT_FIXTURES "/tokenizer").special_id(kMediaPad);
}

Outcome logits(const testing::ScratchDir& dir, const std::vector<int64_t>& ids,
               std::vector<std::string> more) {
  testing::put_file(dir / "ids.json", nlohmann::json(ids).dump());
  std::vector<std::string> args = {"logits",         "--model", seeing_directory(),   "--tokens",
                                   dir / "ids.json", "--out",   dir / "l.safetensors"};
  args.insert(args.end(), more.begin(), more.end());
  return run(args);
}

at::Tensor logits_of(const std::vector<int64_t>& ids, const std::vector<std::string>& more) {
  const testing::ScratchDir dir;
  const Outcome o = logits(dir, ids, more);
  EXPECT_EQ(o.code, 0) << o.err;
  return io::load_tensors(dir / "l.safetensors").at(0).second.clone();
}

TEST(CliVision, LogitsWidenOnePlaceOrTakeARun) {
  const int64_t p = pad();
  const at::Tensor run_of_two = logits_of({5, p, p, 6, p, p, 7}, {"--image", kPicture, "--image", kPicture});
  ASSERT_EQ(run_of_two.size(0), 7);
  const at::Tensor one = logits_of({5, p, 6, p, 7}, {"--image", kPicture, "--image", kPicture});
  EXPECT_TRUE(test::bit_equal(one, run_of_two));
  const at::Tensor pieces =
      logits_of({5, p, 6, p, 7}, {"--image", kPicture, "--image", kPicture, "--split", "2,1,2,2"});
  EXPECT_TRUE(test::close(pieces, run_of_two, test::kFp32Model));
  const at::Tensor other =
      logits_of({5, p, p, 6, p, 7}, {"--image", kPicture, "--image", GODWIT_FIXTURES "/images/tiny.png"});
  EXPECT_TRUE(test::bit_equal(other.slice(0, 0, 4), run_of_two.slice(0, 0, 4)));
  EXPECT_FALSE(test::close(other[5], run_of_two[6], test::kFp32Model));
}

TEST(CliVision, CountsThatDifferAreErrors) {
  const testing::ScratchDir dir;
  const auto fault = [&](const std::vector<int64_t>& ids, const std::vector<std::string>& more,
                         const std::string& part) {
    const Outcome o = logits(dir, ids, more);
    EXPECT_EQ(o.code, 1);
    EXPECT_EQ(o.err_lines(), 1) << o.err;
    EXPECT_NE(o.err.find(part), std::string::npos) << o.err;
  };
  fault({5, pad(), 6, pad()}, {"--image", kPicture},
        "more <|media_pad|> than --image accounts for: 1 images");
  fault({5, 6}, {"--image", kPicture}, "<|media_pad|> for 0 of 1 images");
  fault({5, pad()}, {"--image", dir / "absent.png"}, "absent.png");
  fault({5, pad()}, {"--image", "/dev/zero"}, "no regular file");
  const Outcome blind =
      run({"generate", "--model", test::tiny_directory(), "--prompt", "x", "--image", kPicture});
  EXPECT_EQ(blind.code, 1);
  EXPECT_NE(blind.err.find("this model takes no images"), std::string::npos) << blind.err;
}

TEST(CliVision, GenerateAndChat) {
  const std::string place = "<|kimi_image_placeholder|>";
  const auto tokens = [&](const std::string& prompt, const std::vector<std::string>& images) {
    std::vector<std::string> args = {
        "generate", "--model", seeing_directory(), "--prompt", prompt, "--max-tokens", "2", "--json"};
    for (const std::string& image : images) args.insert(args.end(), {"--image", image});
    const Outcome o = run(args);
    EXPECT_EQ(o.code, 0) << o.err;
    return o.code == 0 ? o.json()["prompt_tokens"].get<int64_t>() : -1;
  };
  const int64_t text = tokens("two words", {}), one = tokens("two words", {kPicture});
  EXPECT_GT(one, text + 2);
  EXPECT_EQ(tokens(place + "two words", {kPicture}), one);
  EXPECT_GT(tokens(place + "two" + place + " words", {kPicture, kPicture}), one);
  const Outcome more =
      run({"generate", "--model", seeing_directory(), "--prompt", place + place, "--image", kPicture});
  EXPECT_EQ(more.code, 1);
  EXPECT_NE(more.err.find("more places for images than there are: 1"), std::string::npos) << more.err;

  const Outcome chat = run({"chat", "--model", seeing_directory(), "--max-tokens", "2", "--image", kPicture},
                           "what?\n/image " + kPicture + "\n/image absent.png\nand this?\n");
  EXPECT_EQ(chat.code, 0) << chat.err;
  EXPECT_NE(chat.err.find("absent.png"), std::string::npos) << chat.err;
}

TEST(CliVision, EvalAsksThreeTimes) {
  const testing::ScratchDir dir;
  std::string lines;
  for (int i = 0; i < 6; ++i)
    lines += R"({"task": "t", "content": [{"type": "image", "image": ")" + kPicture +
             R"("}, {"type": "text", "text": "?"}], "answer": ")" + std::to_string(i % 2) + "\"}\n";
  testing::put_file(dir / "q.jsonl", lines);
  const Outcome o =
      run({"eval", "vision", "--model", seeing_directory(), "--data", dir / "q.jsonl", "--json"});
  ASSERT_EQ(o.code, 0) << o.err;
  const nlohmann::json task = o.json()["tasks"][0];
  EXPECT_EQ(task["name"], "t");
  EXPECT_EQ(task["samples"], 6);
  EXPECT_EQ(task["chance"], 0.5);
  for (const char* arm : {"accuracy", "blank", "shuffled"}) EXPECT_LE(task[arm].get<double>(), 1.0);
}

}  // namespace
}  // namespace godwit
