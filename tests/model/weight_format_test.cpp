// Packed weights in a whole model: what is loaded, and that the logits are those of the weights they stand
// for.
#include "godwit/model/weight_format.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "godwit/io/checkpoint_dir.h"
#include "godwit/io/checkpoint_tensor.h"
#include "godwit/model/checkpoint.h"
#include "godwit/model/forward.h"
#include "godwit/ops/mxfp4_limit.h"
#include "tests/model/tiny.h"
#include "tests/support/compare.h"
#include "tests/support/files.h"

namespace godwit {
namespace {

using at::Tensor;

const std::string kK3 = GODWIT_FIXTURES "/k3";  // MXFP4 experts

// Every packed parameter in fp32.
ModelWeights unpacked_weights(const ModelConfig& config, ModelWeights weights) {
  for_each_param(config, weights, [](const ParamInfo& info, Tensor& value) {
    if (info.is_matrix) as_matrix(info, value) = Matrix(ops::unpacked(as_matrix(info, value)));
  });
  return weights;
}

PackedBatch some_batch(const ModelConfig& config) {
  return {.ids = at::arange(0, 40, at::kLong).mul(7).remainder(config.vocab_size),
          .cu_seqlens = make_cu_seqlens({23, 17})};
}

ModelConfig wide_tiny(ModelConfig config) {  // MXFP4 takes groups of 32
  config.moe.inner = 32;
  if (config.moe.latent > 0) config.moe.latent = 32;
  return config;
}

TEST(WeightFormat, LogitsAreThoseOfTheWeightsItStandsFor) {
  const at::NoGradGuard no_grad;
  for (const auto& [name, tiny] : test::tiny_variants()) {
    const ModelConfig config = wide_tiny(tiny);
    for (const char* format : {"int8", "mxfp4", "mxfp4+int8"}) {
      ModelWeights weights = init_weights(config, 3, at::kCPU, at::kFloat);
      const int64_t before = weight_bytes(config, weights);
      pack_weights(config, weights, weight_format_of(format));
      EXPECT_LT(weight_bytes(config, weights), before);
      EXPECT_EQ(weight_bytes(config, weights), weight_bytes(config, weight_format_of(format), at::kFloat));
      const Tensor packed = forward_logits(config, weights, some_batch(config));
      const Tensor plain = forward_logits(config, unpacked_weights(config, weights), some_batch(config));
      EXPECT_TRUE(test::bit_equal(packed, plain)) << name << " " << format;
    }
  }
}

TEST(WeightFormat, LoadingPacksWhatPackingPacks) {
  const ModelConfig config = wide_tiny(test::tiny_config());
  ModelWeights saved = init_weights(config, 4, at::kCPU, at::kFloat);
  const testing::ScratchDir dir;
  save_weights(config, saved, dir.path());
  for (const char* name : {"int8", "mxfp4+int8"}) {
    const WeightFormat format = weight_format_of(name);
    ModelWeights loaded = load_weights(config, dir.path(), at::kCPU, at::kFloat, format);
    ModelWeights packed = init_weights(config, 4, at::kCPU, at::kFloat);
    pack_weights(config, packed, format);
    std::vector<Tensor> expected;
    for_each_param(config, packed, [&](const ParamInfo& info, Tensor& value) {
      expected.push_back(value);
      if (info.is_matrix) expected.push_back(as_matrix(info, value).scale);
    });
    size_t next = 0;
    for_each_param(config, loaded, [&](const ParamInfo& info, Tensor& value) {
      EXPECT_TRUE(test::bit_equal(value, expected[next++])) << info.name;
      if (!info.is_matrix) return;
      const Tensor scale = as_matrix(info, value).scale;
      EXPECT_EQ(scale.defined(), format.packs(info)) << info.name;
      if (scale.defined()) {
        EXPECT_TRUE(test::bit_equal(scale, expected[next])) << info.name;
      }
      ++next;
    });
  }
}

// The bytes of the file are the bytes in memory, and mean what a load in fp32 gives.
TEST(WeightFormat, Mxfp4ExpertsKeepTheirBytes) {
  const at::NoGradGuard no_grad;
  const ModelConfig config = load_model_config(kK3);
  const ModelWeights packed = load_weights(config, kK3, at::kCPU, at::kFloat, weight_format_of("mxfp4"));
  const ModelWeights plain = load_weights(config, kK3, at::kCPU, at::kFloat);
  const io::CheckpointDir checkpoint(kK3);
  int64_t seen = 0;
  for (int64_t i = 0; i < config.layers; ++i) {
    if (!packed.layers[i].moe) continue;
    const MoeWeights& moe = *packed.layers[i].moe;
    for (int64_t e = 0; e < config.moe.experts; e += 5) {
      const std::string at = config.prefix() + "model.layers." + std::to_string(i) +
                             ".block_sparse_moe.experts." + std::to_string(e) + ".";
      for (const auto& [name, matrix] : {std::pair{"w1", &moe.w1}, {"w3", &moe.w3}, {"w2", &moe.w2}}) {
        EXPECT_TRUE(
            test::bit_equal(matrix->select(0, e), io::tensor_view(checkpoint, at + name + ".weight_packed")));
        EXPECT_TRUE(test::bit_equal(matrix->scale.select(0, e),
                                    io::tensor_view(checkpoint, at + name + ".weight_scale")));
        ++seen;
      }
    }
  }
  EXPECT_GT(seen, 0);
  EXPECT_TRUE(test::bit_equal(forward_logits(config, packed, some_batch(config)),
                              forward_logits(config, plain, some_batch(config))));
}

// A GPU's kernels go on with 2 above a scale of 2: refused on the host.
TEST(WeightFormat, ScalesThatADeviceDoesNotTake) {
  const at::Device gpu(at::kCUDA, 0);
  const Tensor scales = at::full({2, 2}, 128, at::kByte);
  ops::check_mxfp4_scales("w", scales, gpu);
  scales[1][0] = 129;
  testing::expect_error([&] { ops::check_mxfp4_scales("layer.w1.weight_scale", scales, gpu); },
                        {"layer.w1.weight_scale: a scale of 2^2", "cuda:0 take 2^1 at most"});
  ops::check_mxfp4_scales("w", scales, at::kCPU);
  ops::check_mxfp4_scales("w", at::empty({0}, at::kByte), gpu);
}

TEST(WeightFormat, RefusesWhatIsNoFormat) {
  testing::expect_error([] { weight_format_of("int4"); }, {"int8", "mxfp4+int8", "int4"});
  ModelConfig narrow = test::tiny_config();  // experts of width 8
  ModelWeights weights = init_weights(narrow, 1, at::kCPU, at::kFloat);
  testing::expect_error([&] { pack_weights(narrow, weights, weight_format_of("mxfp4")); },
                        {"w1", "multiple of 32"});
}

}  // namespace
}  // namespace godwit
