// Pictures and text in one run: it learns from the pictures, and goes on bit for bit.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "godwit/base/file.h"
#include "godwit/data/tokenizer.h"
#include "godwit/io/animation.h"
#include "godwit/train/held_out.h"
#include "tests/support/compare.h"
#include "tests/train/tiny_run.h"

namespace godwit::test {
namespace {

constexpr const char* kVision =
    "model.override.vision_config={patch_size = 14, init_pos_emb_height = 2, init_pos_emb_width = 2, "
    "vt_num_hidden_layers = 1, vt_hidden_size = 16, vt_intermediate_size = 32, vt_num_attention_heads = 2, "
    "qkv_hidden_size = 16}";

// Squares in one of four corners; the answer is the corner. Only the picture tells.
class VisionRun : public TinyRun {
 protected:
  void SetUp() override {
    TinyRun::SetUp();
    std::vector<std::string> ranks;
    for (int b = 0; b < 256; ++b) ranks.emplace_back(1, static_cast<char>(b));
    const Tokenizer tokenizer = Tokenizer::from_ranks(std::move(ranks));
    std::string lines;
    for (int corner = 0; corner < 4; ++corner) {
      io::Image image{.width = 28, .height = 28, .mode = io::ImageMode::kRgba};
      image.pixels.assign(28 * 28 * 4, 255);
      for (int y = 0; y < 14; ++y) {
        for (int x = 0; x < 14; ++x) {
          uint8_t* pixel = &image.pixels[((corner / 2 * 14 + y) * 28 + corner % 2 * 14 + x) * 4];
          pixel[0] = pixel[1] = pixel[2] = 0;
        }
      }
      io::write_file_atomic(root_ / fmt::format("{}.png", corner), io::encode_png(image));
    }
    for (int i = 0; i < 64; ++i)
      lines += fmt::format(
          "{{\"content\": [{{\"type\": \"image\", \"image\": \"{}.png\"}}], \"answer\": \"{}\"}}\n", i % 4,
          "abcd"[i % 4]);
    io::write_file_atomic(root_ / "pictures.jsonl", lines);
    io::write_file_atomic(root_ / "words.txt", std::string(2000, 'w'));
    pack(root_ / "pictures.jsonl", "pictures", tokenizer);
    pack(root_ / "words.txt", "words", tokenizer);
  }

  void pack(const fs::path& input, const std::string& out, const Tokenizer& tokenizer) {
    data::PackOptions options;
    options.inputs = {input};
    options.out = root_ / out;
    options.tokenizer = data::pack_tokenizer(tokenizer);
    data::pack_corpus(options);
  }

  Recipe seeing(const std::string& out, std::vector<std::string> extra = {}) {
    extra.insert(extra.begin(),
                 {kVision, "data.0.path=" + (root_ / "pictures").string(), "data.0.weight=3.0",
                  "stage.0.context=48", "stage.0.batch_tokens=192", "stage.1.context=96",
                  "stage.1.batch_tokens=192", "eval.data=[\"" + (root_ / "pictures").string() + "\"]"});
    Recipe recipe = TinyRun::recipe(out, extra);
    recipe.data.push_back({.name = "words", .path = (root_ / "words").string(), .weight = 1});
    return recipe;
  }
};

TEST_F(VisionRun, LearnsWhatOnlyThePictureTells) {
  run_training(seeing("a", {"stage.0.steps=60", "optimizer.muon_lr=0.02", "optimizer.adamw_lr=0.02"}), {});
  const auto rows = metrics("a");
  // Four answers, and the end: blind, no answer is better than ln 4 = 1.39 nats, half of that a token.
  EXPECT_LT(rows.back().at("held_out_loss").get<double>(), 0.35);
  EXPECT_GT(rows.front().at("vision_grad_norm").get<double>(), 0);
  EXPECT_TRUE(fs::exists(root_ / "a/model/preprocessor_config.json"));
  bool tower = false;
  for (const auto& [name, tensor] : model("a")) tower |= name == "vision_tower.encoder.blocks.0.wqkv.weight";
  EXPECT_TRUE(tower);
}

TEST_F(VisionRun, ResumesBitForBit) {
  run_training(seeing("whole"), {});
  run_training(seeing("parts", {"checkpoint.every=5", "train.time_limit_s=0.000001"}), {});
  for (int i = 0; i < 40 && metrics("parts").size() < metrics("whole").size(); ++i)
    run_training(seeing("parts", {"checkpoint.every=5", "train.time_limit_s=0.000001"}), {.resume = true});
  run_training(seeing("parts", {"checkpoint.every=5"}), {.resume = true});
  const auto a = model("whole"), b = model("parts");
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(bit_equal(a[i].second, b[i].second)) << a[i].first;
}

TEST_F(VisionRun, MicroBatchesGiveTheSame) {
  run_training(seeing("whole", {"stage.0.steps=2", "stage.1.steps=1"}), {});
  run_training(seeing("parts", {"stage.0.steps=2", "stage.1.steps=1", "train.micro_batch_tokens=96"}), {});
  const auto a = model("whole"), b = model("parts");
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(close(b[i].second, a[i].second, 1e-3)) << a[i].first;
}

TEST_F(VisionRun, SaysWhatDoesNotFit) {
  Recipe blind = seeing("blind");
  blind.model.override_json = TinyRun::recipe("x").model.override_json;
  EXPECT_NE(error_of(blind).find("has no vision_config, and the data have pictures"), std::string::npos)
      << error_of(blind);
  EXPECT_NE(
      error_of(seeing("other", {"model.override.vision_config.patch_size=7"})).find("patches of 14 pixels"),
      std::string::npos);
}

TEST(ToDevice, BytesBecomeTheProcessorsPatches) {
  io::Image image{.width = 40, .height = 25, .mode = io::ImageMode::kRgb};
  for (int i = 0; i < 40 * 25 * 3; ++i) image.pixels.push_back(static_cast<uint8_t>(i * 37));
  const io::ImageProcessorConfig processor{.mean = {0.5, 0.25, 0.1}, .std = {0.5, 0.3, 0.7}};
  const io::PreparedImage prepared = io::prepare_image(image, processor);
  data::PackedBatch batch;
  batch.ids = batch.targets = {1, 1};
  batch.cu_seqlens.push_back(2);
  batch.media = {{1, prepared.plan.grid_height, prepared.plan.grid_width, 0, prepared.plan.tokens}};
  batch.values = io::pixel_values(processor);
  io::append_patch_bytes(prepared, processor, batch.pixels);
  const at::Tensor patches = to_device(batch, at::kCPU).pictures.patches;
  const std::vector<float> expected = io::image_patches(prepared, processor);
  ASSERT_EQ(patches.numel(), static_cast<int64_t>(expected.size()));
  EXPECT_EQ(patches.size(1), 3 * 14 * 14);
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), patches.const_data_ptr<float>()));
}

}  // namespace
}  // namespace godwit::test
