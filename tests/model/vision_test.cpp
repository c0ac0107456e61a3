// The vision tower's properties; its values are compared with an independent one in
// tests/python/vision_test.py.
#include "godwit/model/vision.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "godwit/model/checkpoint.h"
#include "godwit/model/evaluate.h"
#include "godwit/model/forward.h"
#include "godwit/model/vision_position.h"
#include "tests/model/tiny.h"
#include "tests/support/compare.h"
#include "tests/support/files.h"
#include "tests/support/gradients.h"
#include "tests/support/limits.h"

namespace godwit {
namespace {

using at::Tensor;

constexpr int64_t kMedia = 60;

ModelConfig seeing_config(VisionTime time = VisionTime::kJoint) {
  ModelConfig c = test::tiny_config();
  c.media_id = kMedia;
  c.vision = VisionConfig{.patch_size = 4,
                          .pos_emb_height = 5,
                          .pos_emb_width = 7,
                          .pos_emb_time = 4,
                          .time = time,
                          .layers = 2,
                          .hidden = 12,
                          .intermediate = 20,
                          .heads = 2,
                          .qkv_hidden = 16};
  validate(c, "seeing");
  return c;
}

VisionInput pictures(const VisionConfig& v, std::vector<VisionGrid> grids, int64_t seed = 1) {
  at::manual_seed(seed);
  int64_t patches = 0;
  for (const VisionGrid& grid : grids) patches += grid.patches();
  return {.patches = at::randn({patches, 3 * v.patch_size * v.patch_size}), .grids = std::move(grids)};
}

const std::vector<VisionGrid> kGrids = {{1, 2, 2}, {1, 2, 2}, {2, 4, 2}, {1, 6, 4}, {4, 2, 2}, {1, 2, 2}};

class TowerTest : public ::testing::TestWithParam<VisionTime> {
 protected:
  TowerTest()
      : config_(seeing_config(GetParam())), weights_(init_weights(config_, 3, at::kCPU, at::kFloat)) {}
  Tensor run(const VisionInput& input) const { return vision_forward(config_, *weights_.vision, input); }

  const at::NoGradGuard no_grad_;
  ModelConfig config_;
  ModelWeights weights_;
};

TEST_P(TowerTest, PackedIsTheSameAsOneByOne) {
  const VisionInput all = pictures(*config_.vision, kGrids);
  const Tensor together = run(all);
  std::vector<Tensor> alone;
  int64_t begin = 0;
  for (const VisionGrid& grid : kGrids) {
    alone.push_back(run({.patches = all.patches.narrow(0, begin, grid.patches()), .grids = {grid}}));
    EXPECT_EQ(alone.back().size(0), vision_tokens(*config_.vision, grid));
    begin += grid.patches();
  }
  EXPECT_TRUE(test::close(together, at::cat(alone), test::kFp32));
}

TEST_P(TowerTest, EveryPatchOfAnItemCountsAndNoOther) {
  const VisionInput all = pictures(*config_.vision, {{1, 2, 2}, {2, 2, 4}});
  const Tensor before = run(all);
  for (int64_t patch = 0; patch < 20; ++patch) {
    VisionInput changed = {.patches = all.patches.clone(), .grids = all.grids};
    changed.patches[patch] += 1.0;
    const Tensor moved = run(changed).ne(before).any(1);
    const int64_t first = patch < 4 ? 0 : 1, count = patch < 4 ? 1 : 2;
    EXPECT_EQ(moved.sum().item<int64_t>(), count) << patch;
    EXPECT_TRUE(moved.narrow(0, first, count).all().item<bool>()) << patch;
  }
}

// Rotation, grid and times: equal patches give vectors that differ.
TEST_P(TowerTest, PlaceAndTimeMatter) {
  VisionInput same = pictures(*config_.vision, {{1, 4, 4}, {2, 2, 2}, {2, 2, 2}});
  same.patches.narrow(0, 1, 15).copy_(same.patches.narrow(0, 0, 1).expand({15, -1}));
  same.patches.narrow(0, 24, 4).copy_(same.patches.narrow(0, 20, 4));  // the second item: frames exchanged
  same.patches.narrow(0, 28, 4).copy_(same.patches.narrow(0, 16, 4));
  const Tensor out = run(same);
  for (int64_t i = 0; i < 4; ++i) {
    for (int64_t j = 0; j < i; ++j) EXPECT_FALSE(test::close(out[i], out[j], 1e-4)) << i << " " << j;
  }
  EXPECT_FALSE(test::close(out[4], out[5], 1e-5));
}

TEST_P(TowerTest, Gradients) {
  ModelWeights weights = convert_weights(config_, weights_, at::kCPU, at::kDouble);
  const VisionInput input = pictures(*config_.vision, {{1, 2, 2}, {2, 2, 4}, {1, 2, 2}});
  VisionWeights& w = *weights.vision;
  std::vector<Tensor*> places = {&w.patch_proj,   &w.pos_emb,       &w.blocks[0].norm0, &w.blocks[0].wqkv,
                                 &w.blocks[1].wo, &w.blocks[1].fc0, &w.blocks[0].fc1,   &w.final_norm,
                                 &w.proj0,        &w.proj2,         &w.post_norm};
  std::vector<Tensor> values = {input.patches.to(at::kDouble)};
  for (const Tensor* place : places) values.push_back(*place + 0.1 * at::randn_like(*place));
  const auto fn = [&](const std::vector<Tensor>& in) {
    for (size_t i = 0; i < places.size(); ++i) *places[i] = in[i + 1];
    return vision_forward(config_, w, {.patches = in[0], .grids = input.grids});
  };
  EXPECT_TRUE(test::matches_finite_difference(fn, values, at::randn({4, config_.hidden}, at::kDouble)));
}

INSTANTIATE_TEST_SUITE_P(Time, TowerTest, ::testing::Values(VisionTime::kJoint, VisionTime::kFactorised),
                         [](const auto& info) {
                           return info.param == VisionTime::kJoint ? "joint" : "factorised";
                         });

// On a GPU in bf16 and fp32, vectors and every gradient, beside fp64 on the CPU. All see the same weights.
TEST_P(TowerTest, OnAGpu) {
  if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no GPU";
  const at::AutoGradMode grad_mode(true);
  const Tensor patches = pictures(*config_.vision, kGrids).patches.to(at::kBFloat16);
  ModelWeights rounded = convert_weights(config_, weights_, at::kCPU, at::kBFloat16);
  const auto run_on = [&](at::Device device, at::ScalarType type) {
    ModelWeights weights = convert_weights(config_, rounded, device, type);
    set_requires_grad(config_, weights, true);
    const Tensor vectors = vision_forward(config_, *weights.vision, {.patches = patches, .grids = kGrids});
    (vectors * at::ones_like(vectors).cumsum(0)).sum().backward();
    std::vector<Tensor> out{vectors.detach()};
    for_each_param(config_, weights, [&](const ParamInfo& info, Tensor& value) {
      if (info.name.starts_with("vision_tower.")) out.push_back(value.grad());
    });
    return out;
  };
  const std::vector<Tensor> want = run_on(at::kCPU, at::kDouble);
  for (const auto& [type, limit] :
       {std::pair(at::kFloat, test::kFp32Grad), std::pair(at::kBFloat16, test::kBf16Grad)}) {
    const std::vector<Tensor> got = run_on(at::kCUDA, type);
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(test::close_norm(got[i], want[i], limit)) << i;
  }
}

TEST(Vision, PositionGridAsTorchInterpolates) {
  at::manual_seed(2);
  for (const bool bicubic : {false, true}) {
    VisionConfig v = *seeing_config().vision;
    v.pos_emb_bicubic = bicubic;
    const Tensor grid = at::randn({v.pos_emb_height, v.pos_emb_width, v.hidden}, at::kDouble);
    for (const auto& [rows, columns] :
         std::vector<std::pair<int64_t, int64_t>>{{5, 7}, {2, 2}, {10, 14}, {64, 2}, {6, 20}}) {
      const Tensor image = grid.permute({2, 0, 1}).unsqueeze(0);
      const std::vector<int64_t> size = {rows, columns};
      const Tensor theirs = bicubic ? at::upsample_bicubic2d(image, size, /*align_corners=*/false)
                                    : at::upsample_bilinear2d(image, size, /*align_corners=*/false);
      const Tensor expected = theirs[0].permute({1, 2, 0}).reshape({rows * columns, v.hidden});
      const Tensor ours = position_at_size(v, grid, {.rows = rows, .columns = columns});
      EXPECT_TRUE(test::close(ours, expected, rows == 5 ? test::kFp64 : test::kFp32))
          << rows << " x " << columns;
    }
  }
}

TEST(Vision, RefusesWhatTheTowerCannotTake) {
  const ModelConfig config = seeing_config();
  const ModelWeights weights = init_weights(config, 3, at::kCPU, at::kFloat);
  const auto refused = [&](VisionInput input, std::initializer_list<std::string> parts) {
    testing::expect_error([&] { vision_forward(config, *weights.vision, input); }, parts);
  };
  refused(pictures(*config.vision, {{1, 3, 2}}), {"3 x 2 patches are no whole number of 2 x 2"});
  refused(pictures(*config.vision, {{5, 2, 2}}), {"5 frames together, the tower takes 1 to 4"});
  VisionInput few = pictures(*config.vision, {{1, 2, 2}});
  few.grids = {{1, 2, 4}};
  refused(few, {"expected patches [8, 48]", "[4, 48]"});
  EXPECT_EQ(vision_forward(config, *weights.vision, pictures(*config.vision, {})).size(0), 0);
}

class MediaTest : public ::testing::Test {
 protected:
  // Two documents with 3 + 1 placeholders.
  static PackedBatch batch(const Tensor& media) {
    Tensor ids = at::arange(24).remainder(50);
    ids[0] = kMedia;
    ids[4] = kMedia;
    ids[5] = kMedia;
    ids[20] = kMedia;
    return {.ids = ids, .cu_seqlens = make_cu_seqlens({11, 13}), .media = media};
  }
  const at::NoGradGuard no_grad_;
  ModelConfig config_ = seeing_config();
  ModelWeights weights_ = init_weights(config_, 3, at::kCPU, at::kFloat);
};

TEST_F(MediaTest, VectorsTakeThePlacesInOrder) {
  const Tensor media = at::randn({4, config_.hidden});
  // A token whose embedding is the vector must do the same.
  ModelWeights told = convert_weights(config_, weights_, at::kCPU, at::kFloat);
  PackedBatch plain = batch({});
  const int64_t places[] = {0, 4, 5, 20};
  for (int64_t i = 0; i < 4; ++i) {
    told.embed[52 + i].copy_(media[i]);
    plain.ids[places[i]] = 52 + i;
  }
  EXPECT_TRUE(
      test::bit_equal(forward_hidden(config_, weights_, batch(media)), forward_hidden(config_, told, plain)));
}

TEST_F(MediaTest, AnotherCountIsAnError) {
  for (const int64_t count : {0, 3, 5}) {
    testing::expect_error(
        [&] {
          forward_hidden(config_, weights_, batch(at::randn({count, config_.hidden})));
        },
        {"4 <|media_pad|> tokens (id 60)", "the " + std::to_string(count) + " vectors"});
  }
}

TEST_F(MediaTest, EvaluationInPieces) {
  const PackedBatch all = batch(at::randn({4, config_.hidden}));
  const Tensor targets = at::arange(24).remainder(40);
  const Tensor whole = token_losses(config_, weights_, all, targets);
  for (const int64_t piece : {1, 5, 12, 13})
    EXPECT_TRUE(test::close(token_losses(config_, weights_, all, targets, piece), whole, test::kFp32Chain))
        << piece;
}

TEST_F(MediaTest, SaveThenLoadWithAndWithoutTheTower) {
  for (const bool tower : {true, false}) {
    if (!tower) weights_.vision.reset();
    const testing::ScratchDir dir;
    save_weights(config_, weights_, dir.path());
    ModelWeights read = load_weights(load_model_config(dir.path()), dir.path(), at::kCPU, at::kFloat);
    ASSERT_EQ(read.vision.has_value(), tower);
    std::vector<Tensor> expected;
    for_each_param(config_, weights_, [&](const ParamInfo&, Tensor& value) { expected.push_back(value); });
    size_t next = 0;
    for_each_param(config_, read, [&](const ParamInfo& info, Tensor& value) {
      EXPECT_TRUE(test::bit_equal(value, expected[next++])) << info.name;
    });
    EXPECT_EQ(next, expected.size());
  }
}

}  // namespace
}  // namespace godwit
