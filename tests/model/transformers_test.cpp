// Against an independent implementation: small Kimi-Linear models that transformers saved, and their logits
// (python/make_kimi_linear_fixture.py). Checks loading, KDA with softplus decay, MLA, router and experts at
// once, whole and in pieces; and that what we save has the names, shapes and types of theirs.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "godwit/base/file.h"
#include "godwit/io/checkpoint_tensor.h"
#include "godwit/model/checkpoint.h"
#include "godwit/model/forward.h"
#include "tests/support/compare.h"
#include "tests/support/files.h"

namespace godwit {
namespace {

class Transformers : public ::testing::TestWithParam<const char*> {
 protected:
  Transformers()
      : directory_(std::string(GODWIT_FIXTURES "/") + GetParam()), config_(load_model_config(directory_)) {
    ids_ = nlohmann::json::parse(read_file(directory_ + "/ids.json")).get<std::vector<int64_t>>();
    for (const auto& [name, tensor] : io::load_tensors(directory_ + "/logits.safetensors")) {
      expected_.emplace(name, tensor);
    }
  }

  // In pieces of these sizes on a carried state; all at once without.
  at::Tensor logits(const ModelWeights& weights, const std::vector<int64_t>& pieces) const {
    const at::Tensor all = at::tensor(ids_, at::kLong);
    if (pieces.empty()) {
      return forward_logits(config_, weights, {.ids = all, .cu_seqlens = make_cu_seqlens({all.size(0)})});
    }
    ModelState state(config_, {.sequences = 1}, at::kCPU, weights.embed.scalar_type());
    std::vector<at::Tensor> out;
    int64_t begin = 0;
    for (const int64_t n : pieces) {
      out.push_back(forward_logits(
          config_, weights, {.ids = all.narrow(0, begin, n), .cu_seqlens = make_cu_seqlens({n})}, &state));
      begin += n;
    }
    return at::cat(out);
  }

  const at::NoGradGuard no_grad_;
  std::string directory_;
  ModelConfig config_;
  std::vector<int64_t> ids_;  // 70
  std::map<std::string, at::Tensor> expected_;
};

TEST_P(Transformers, Logits) {
  const ModelWeights weights = load_weights(config_, directory_, at::kCPU, at::kFloat);
  const at::Tensor& expected = expected_.at("logits");
  EXPECT_TRUE(test::close(logits(weights, {}), expected, test::kFp32Transformers));
  EXPECT_TRUE(test::close(logits(weights, {64, 6}), expected, test::kFp32Transformers)) << "chunked prefill";
  EXPECT_TRUE(test::close(logits(weights, {1, 15, 17, 37}), expected, test::kFp32Transformers));
  std::vector<int64_t> steps(ids_.size(), 1);
  EXPECT_TRUE(test::close(logits(weights, steps), expected, test::kFp32Transformers)) << "step by step";
}

// bf16 is judged by its distance from fp32, beside that of transformers' own bf16, whole and step by step.
// Where each rounds differs, and a median of 70 tokens has noise of its own: hence the factor.
TEST_P(Transformers, Bf16IsAsNearAsTheirs) {
  const ModelWeights weights = load_weights(config_, directory_, at::kCPU, at::kBFloat16);
  const at::Tensor& exact = expected_.at("logits");
  const auto distance = [&](const at::Tensor& x) {  // of the median token: a choice of experts may flip
    return ((x.to(at::kFloat) - exact).norm(2, 1) / exact.norm(2, 1)).median().item<double>();
  };
  const double theirs = std::max(distance(expected_.at("bf16_whole")), distance(expected_.at("bf16_steps")));
  EXPECT_LE(distance(logits(weights, {})), 1.25 * theirs);
  EXPECT_LE(distance(logits(weights, std::vector<int64_t>(ids_.size(), 1))), 1.25 * theirs);
}

TEST_P(Transformers, SavedAsTheySave) {
  ModelWeights weights = load_weights(config_, directory_, at::kCPU, at::kFloat);
  const testing::ScratchDir dir;
  save_weights(config_, weights, dir.path());
  // The dense layer's name is the released one; transformers writes it under the MoE's and reads both.
  const auto released = [](const std::string& name) {
    const size_t at = name.find(".block_sparse_moe.");
    const bool dense = at != std::string::npos && name.substr(at + 18, 7) != "experts" &&
                       name.substr(at + 18, 6) != "shared" &&
                       name.find("_proj.weight", at) != std::string::npos;
    return dense ? std::string(name).replace(at, 18, ".mlp.") : name;
  };
  const auto listing = [&](const std::string& directory) {
    std::map<std::string, std::pair<at::ScalarType, std::vector<int64_t>>> out;
    for (const auto& [name, tensor] : io::load_tensors(directory + "/model.safetensors")) {
      out.emplace(released(name), std::pair(tensor.scalar_type(), tensor.sizes().vec()));
    }
    return out;
  };
  EXPECT_EQ(listing(dir.path()), listing(directory_));

  // Read again it is the same model.
  const ModelConfig again = load_model_config(dir.path());
  EXPECT_EQ(to_json(again), to_json(config_));
  const ModelWeights copy = load_weights(again, dir.path(), at::kCPU, at::kFloat);
  EXPECT_TRUE(test::bit_equal(logits(copy, {}), logits(weights, {})));
}

INSTANTIATE_TEST_SUITE_P(Shapes, Transformers, ::testing::Values("kimi_linear", "kimi_linear_groups"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace godwit
