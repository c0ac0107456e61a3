// Against an independent implementation: a small Kimi-Linear model that transformers saved, and its logits
// (python/make_kimi_linear_fixture.py). Checks loading, KDA with softplus decay, MLA, router and experts at
// once.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "godwit/base/file.h"
#include "godwit/io/checkpoint_tensor.h"
#include "godwit/model/checkpoint.h"
#include "godwit/model/forward.h"
#include "tests/support/compare.h"
#include "tests/support/files.h"

namespace godwit {
namespace {

const std::string kFixture = GODWIT_FIXTURES "/kimi_linear";

TEST(Transformers, KimiLinearLogits) {
  const at::NoGradGuard no_grad;
  const ModelConfig config = load_model_config(kFixture);
  ModelWeights weights = load_weights(config, kFixture, at::kCPU, at::kFloat);
  const auto ids = nlohmann::json::parse(read_file(kFixture + "/ids.json")).get<std::vector<int64_t>>();
  const auto tokens = static_cast<int64_t>(ids.size());
  const at::Tensor expected = io::load_tensors(kFixture + "/logits.safetensors").at(0).second;
  const PackedBatch batch{.ids = at::tensor(ids, at::kLong), .cu_seqlens = make_cu_seqlens({tokens})};
  EXPECT_TRUE(test::close(forward_logits(config, weights, batch), expected, test::kFp32Chain));

  // Written and read by us, it is the same model.
  const testing::ScratchDir dir;
  save_weights(config, weights, dir.path());
  const ModelConfig again = load_model_config(dir.path());
  const ModelWeights copy = load_weights(again, dir.path(), at::kCPU, at::kFloat);
  EXPECT_TRUE(test::close(forward_logits(again, copy, batch), expected, test::kFp32Chain));
}

}  // namespace
}  // namespace godwit
