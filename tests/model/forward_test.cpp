// Properties of the whole model on tiny configurations, every option.
#include "godwit/model/forward.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "godwit/base/check.h"
#include "godwit/ops/ops.h"
#include "tests/model/tiny.h"
#include "tests/support/compare.h"

namespace godwit {
namespace {

using at::Tensor;
using test::close;

PackedBatch random_batch(const ModelConfig& c, const std::vector<int64_t>& lengths, uint64_t seed) {
  at::manual_seed(seed);
  const Tensor cu = make_cu_seqlens(lengths);
  return {at::randint(c.vocab_size, {cu[-1].item<int64_t>()}, at::kLong), cu};
}

// Weights with nothing at its neutral start: AttnRes queries and router biases random too.
ModelWeights random_weights(const ModelConfig& c, at::ScalarType dtype) {
  ModelWeights w = init_weights(c, 3, at::kCPU, dtype);
  at::manual_seed(5);
  for_each_param(c, w, [&](const ParamInfo& info, Tensor& value) {
    if (info.keep_fp32) value = value.to(dtype);
    if (info.role == ParamRole::kQuery) value = at::randn_like(value) * 0.5;
    if (info.role == ParamRole::kRouterBias) value = at::randn_like(value) * 0.1;
    if (info.role == ParamRole::kNorm) value = value + 0.1 * at::randn_like(value);
  });
  return w;
}

class Variants : public ::testing::TestWithParam<test::NamedConfig> {};

TEST_P(Variants, PrefillAndDecodeEqualForwardAtEverySplit) {
  const ModelConfig& c = GetParam().config;
  const at::NoGradGuard no_grad;
  const ModelWeights w = random_weights(c, at::kFloat);
  const int64_t T = 21;
  const PackedBatch whole = random_batch(c, {T}, 1);
  const Tensor expected = forward_logits(c, w, whole);
  for (int64_t split = 1; split < T; ++split) {
    ModelState state(c, {.sequences = 1}, at::kCPU, at::kFloat);
    std::vector<Tensor> parts = {
        forward_logits(c, w, {whole.ids.slice(0, 0, split), make_cu_seqlens({split})}, &state)};
    if (split % 2 == 0) {  // a second prefill piece
      parts.push_back(
          forward_logits(c, w, {whole.ids.slice(0, split, T), make_cu_seqlens({T - split})}, &state));
    } else {  // token by token
      for (int64_t t = split; t < T; ++t)
        parts.push_back(forward_logits(c, w, {whole.ids.slice(0, t, t + 1), make_cu_seqlens({1})}, &state));
    }
    EXPECT_TRUE(close(at::cat(parts), expected, test::kFp32Model)) << "split at " << split;
    EXPECT_EQ(state.length(0), T);
  }
}

TEST_P(Variants, PackedEqualsSeparate) {
  const ModelConfig& c = GetParam().config;
  const at::NoGradGuard no_grad;
  const ModelWeights w = random_weights(c, at::kFloat);
  const std::vector<int64_t> lengths = {5, 0, 1, 33, 2, 17};
  const PackedBatch packed = random_batch(c, lengths, 2);
  const Tensor all = forward_logits(c, w, packed);
  int64_t at = 0;
  for (const int64_t length : lengths) {
    const Tensor alone =
        forward_logits(c, w, {packed.ids.slice(0, at, at + length), make_cu_seqlens({length})});
    EXPECT_TRUE(close(all.slice(0, at, at + length), alone, test::kFp32Model))
        << "sequence of " << length << " at " << at;
    at += length;
  }
}

TEST_P(Variants, BatchedDecodeEqualsAlone) {
  const ModelConfig& c = GetParam().config;
  const at::NoGradGuard no_grad;
  const ModelWeights w = random_weights(c, at::kFloat);
  const std::vector<int64_t> lengths = {1, 3, 9};
  const PackedBatch prompt = random_batch(c, lengths, 3);
  ModelState together(c, {.sequences = 3}, at::kCPU, at::kFloat);
  forward_logits(c, w, prompt, &together);
  const Tensor next = at::tensor(std::vector<int64_t>{4, 5, 6});
  const Tensor logits = forward_logits(c, w, {next, make_cu_seqlens({1, 1, 1})}, &together);
  for (int64_t n = 0, at = 0; n < 3; at += lengths[n], ++n) {
    ModelState alone(c, {.sequences = 1}, at::kCPU, at::kFloat);
    forward_logits(c, w, {prompt.ids.slice(0, at, at + lengths[n]), make_cu_seqlens({lengths[n]})}, &alone);
    EXPECT_TRUE(close(logits[n],
                      forward_logits(c, w, {next.slice(0, n, n + 1), make_cu_seqlens({1})}, &alone)[0],
                      test::kFp32Model));
  }
}

TEST_P(Variants, LaterTokensDoNotChangeEarlierOutputs) {
  const ModelConfig& c = GetParam().config;
  const at::NoGradGuard no_grad;
  const ModelWeights w = random_weights(c, at::kFloat);
  PackedBatch batch = random_batch(c, {40}, 4);
  const Tensor before = forward_logits(c, w, batch);
  for (const int64_t t : {0, 15, 16, 17, 39}) {
    PackedBatch changed = {batch.ids.clone(), batch.cu_seqlens};
    changed.ids[t] = (batch.ids[t] + 1) % c.vocab_size;
    const Tensor after = forward_logits(c, w, changed);
    EXPECT_TRUE(close(after.slice(0, 0, t), before.slice(0, 0, t), test::kFp32)) << t;
    EXPECT_FALSE(close(after.slice(0, t, t + 1), before.slice(0, t, t + 1), 1e-4)) << t;
  }
}

Tensor loss_of(const ModelConfig& c, const ModelWeights& w, const PackedBatch& batch,
               const ForwardOptions& options = {}) {
  const Tensor hidden = forward_hidden(c, w, batch, nullptr, options);
  const Tensor logits = at::linear(hidden, head_weight(c, w));
  return at::cross_entropy_loss(logits, at::roll(batch.ids, -1));
}

// The gradient of every parameter along a random direction, against a central difference in fp64.
TEST_P(Variants, GradientsAgreeWithFiniteDifferences) {
  const ModelConfig& c = GetParam().config;
  ModelWeights w = random_weights(c, at::kDouble);
  set_requires_grad(c, w, true);
  const PackedBatch batch = random_batch(c, {19, 7}, 5);
  loss_of(c, w, batch).backward();
  at::manual_seed(9);
  for_each_param(c, w, [&](const ParamInfo& info, Tensor& value) {
    if (info.role == ParamRole::kRouterBias) return;
    if (!value.grad().defined()) {  // the first layer's attention mix has one source only
      EXPECT_TRUE(info.name.find("layers.0.self_attention_res") != std::string::npos) << info.name;
      return;
    }
    const at::NoGradGuard no_grad;
    Tensor direction = at::randn_like(value);
    direction /= direction.norm();  // small enough that no expert choice flips
    const double step = 1e-6;
    const Tensor original = value.detach().clone();
    value.copy_(original + step * direction);
    const double up = loss_of(c, w, batch).item<double>();
    value.copy_(original - step * direction);
    const double down = loss_of(c, w, batch).item<double>();
    value.copy_(original);
    const double expected = (up - down) / (2 * step);
    const double actual = (value.grad() * direction).sum().item<double>();
    // The loss is rounded to 4e-16 of its size, about 4, and divided by the step; the rest is curvature.
    EXPECT_NEAR(actual, expected, 5e-9 + 1e-5 * std::abs(expected)) << info.name;
  });
}

TEST_P(Variants, RecomputationChangesNoGradient) {
  const ModelConfig& c = GetParam().config;
  const PackedBatch batch = random_batch(c, {19, 7}, 6);
  std::vector<Tensor> grads[2];
  int calls[2] = {0, 0};
  for (const bool recompute : {false, true}) {
    ModelWeights w = random_weights(c, at::kFloat);
    set_requires_grad(c, w, true);
    ForwardOptions options;
    options.recompute = recompute;
    options.on_router = [&](const RouterTrace&) { ++calls[recompute]; };
    options.router_loss = [](const RouterTrace& trace) { return trace.logits.square().mean() * 1e-2; };
    loss_of(c, w, batch, options).backward();
    for_each_param(c, w, [&](const ParamInfo&, Tensor& value) {
      if (value.grad().defined()) grads[recompute].push_back(value.grad());
    });
  }
  EXPECT_EQ(calls[0], calls[1]);
  ASSERT_EQ(grads[0].size(), grads[1].size());
  for (size_t i = 0; i < grads[0].size(); ++i)
    EXPECT_TRUE(close(grads[1][i], grads[0][i], test::kFp32Model)) << i;
}

INSTANTIATE_TEST_SUITE_P(Tiny, Variants, ::testing::ValuesIn(test::tiny_variants()),
                         [](const auto& info) { return info.param.name; });

TEST(Forward, MaxLogitsAreExactWhereTheBoundExceedsTheLimit) {
  const ModelConfig c = test::tiny_config();
  const at::NoGradGuard no_grad;
  const ModelWeights w = random_weights(c, at::kFloat);
  const PackedBatch batch = random_batch(c, {300, 40}, 7);
  std::vector<Tensor> exact, bound;
  ForwardOptions options;
  options.qk_limit = 0.0;
  options.on_max_logit = [&](int64_t, const Tensor& m) { exact.push_back(m); };
  forward_hidden(c, w, batch, nullptr, options);
  options.qk_limit = 1e9;
  options.on_max_logit = [&](int64_t, const Tensor& m) { bound.push_back(m); };
  forward_hidden(c, w, batch, nullptr, options);
  ASSERT_EQ(exact.size(), 2u);
  for (size_t i = 0; i < exact.size(); ++i) EXPECT_TRUE((exact[i] <= bound[i] * 1.000001).all().item<bool>());
}

TEST(Forward, RefusesBadInput) {
  const ModelConfig c = test::tiny_config();
  const at::NoGradGuard no_grad;
  const ModelWeights w = random_weights(c, at::kFloat);
  EXPECT_THROW(forward_logits(c, w, {at::tensor(std::vector<int64_t>{0, 61}), make_cu_seqlens({2})}), Error);
  EXPECT_THROW(forward_logits(c, w, {at::tensor(std::vector<int64_t>{0, -1}), make_cu_seqlens({2})}), Error);
  ModelState state(c, {.sequences = 2}, at::kCPU, at::kFloat);
  EXPECT_THROW(forward_logits(c, w, {at::tensor(std::vector<int64_t>{0, 1}), make_cu_seqlens({2})}, &state),
               Error);
}

TEST(Forward, EmptyBatch) {
  const ModelConfig c = test::tiny_config();
  const at::NoGradGuard no_grad;
  const ModelWeights w = random_weights(c, at::kFloat);
  EXPECT_EQ(forward_logits(c, w, {at::empty({0}, at::kLong), make_cu_seqlens({0})}).size(0), 0);
}

}  // namespace
}  // namespace godwit
