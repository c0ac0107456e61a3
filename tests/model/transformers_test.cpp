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

// In pieces of these sizes on a carried state; all at once without.
at::Tensor logits_of(const ModelConfig& config, const ModelWeights& weights, const at::Tensor& ids,
                     const std::vector<int64_t>& pieces) {
  if (pieces.empty()) {
    return forward_logits(config, weights, {.ids = ids, .cu_seqlens = make_cu_seqlens({ids.size(0)})});
  }
  ModelState state(config, {.sequences = 1}, at::kCPU, weights.embed.scalar_type());
  std::vector<at::Tensor> out;
  int64_t begin = 0;
  for (const int64_t n : pieces) {
    out.push_back(forward_logits(
        config, weights, {.ids = ids.narrow(0, begin, n), .cu_seqlens = make_cu_seqlens({n})}, &state));
    begin += n;
  }
  return at::cat(out);
}

class Transformers : public ::testing::TestWithParam<const char*> {
 protected:
  Transformers()
      : directory_(std::string(GODWIT_FIXTURES "/") + GetParam()), config_(load_model_config(directory_)) {
    ids_ = nlohmann::json::parse(read_file(directory_ + "/ids.json")).get<std::vector<int64_t>>();
    for (const auto& [name, tensor] : io::load_tensors(directory_ + "/logits.safetensors")) {
      expected_.emplace(name, tensor);
    }
  }

  at::Tensor logits(const ModelWeights& weights, const std::vector<int64_t>& pieces) const {
    return logits_of(config_, weights, at::tensor(ids_, at::kLong), pieces);
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

// bf16 against transformers' own bf16. Each rounds in its own places, so the two are samples of one error:
// both are measured from fp32, over the tokens of four models, and the mean and the quantiles of ours must
// not exceed the largest of transformers' six runs (eager or SDPA; whole, chunks, steps). A rounding may flip
// a choice of experts, which is in the tails of both.
class TransformersBf16 : public ::testing::TestWithParam<const char*> {};

TEST_P(TransformersBf16, OurErrorsAreNoLargerThanThoseOfItsRuns) {
  const at::NoGradGuard no_grad;
  constexpr int kSeeds = 4;
  std::map<std::string, std::vector<at::Tensor>> ours, theirs;  // run -> errors [T] of each model
  for (int seed = 0; seed < kSeeds; ++seed) {
    const std::string directory =
        std::string(GODWIT_FIXTURES "/kimi_linear_bf16/") + GetParam() + "." + std::to_string(seed);
    std::map<std::string, at::Tensor> expected;
    for (const auto& [name, tensor] : io::load_tensors(directory + "/expected.safetensors")) {
      expected.emplace(name, tensor);
      if (name.starts_with("error.")) theirs[name].push_back(tensor);
    }
    const at::Tensor &ids = expected.at("ids"), &exact = expected.at("logits");
    const ModelConfig config = load_model_config(directory);
    const ModelWeights wide = load_weights(config, directory, at::kCPU, at::kFloat);
    EXPECT_TRUE(test::close(logits_of(config, wide, ids, {}), exact, test::kFp32Transformers)) << directory;
    const ModelWeights half = load_weights(config, directory, at::kCPU, at::kBFloat16);
    const int64_t T = ids.size(0);
    for (const auto& [way, pieces] : std::map<std::string, std::vector<int64_t>>{
             {"whole", {}}, {"chunks", {32, 32, T - 64}}, {"steps", std::vector<int64_t>(T, 1)}}) {
      const at::Tensor got = logits_of(config, half, ids, pieces).to(at::kFloat);
      ours[way].push_back((got - exact).norm(2, 1) / exact.norm(2, 1));
    }
  }
  const auto summary = [](const std::vector<at::Tensor>& errors) {  // mean; quantiles 0.5, 0.9, 0.99
    const at::Tensor all = at::cat(errors);
    const at::Tensor q = at::quantile(all, at::tensor({0.5, 0.9, 0.99}, at::kFloat));
    return at::cat({all.mean().reshape({1}), q});
  };
  at::Tensor limit = at::zeros({4});
  for (const auto& [run, errors] : theirs) limit = at::maximum(limit, summary(errors));
  ASSERT_EQ(theirs.size(), 6U);
  for (const auto& [way, errors] : ours) {
    const at::Tensor got = summary(errors);
    for (int64_t i = 0; i < 4; ++i)
      EXPECT_LE(got[i].item<double>(), limit[i].item<double>()) << way << ": " << got << " limit " << limit;
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, TransformersBf16, ::testing::Values("kimi_linear", "kimi_linear_groups"),
                         [](const auto& info) { return std::string(info.param); });

INSTANTIATE_TEST_SUITE_P(Shapes, Transformers, ::testing::Values("kimi_linear", "kimi_linear_groups"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace godwit
