#include "godwit/model/segments.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tests/model/tiny.h"
#include "tests/support/compare.h"
#include "tests/support/files.h"

namespace godwit {
namespace {

using at::Tensor;

ModelWeights weights_of(const ModelConfig& c) {
  ModelWeights w = init_weights(c, 3, at::kCPU, at::kFloat);
  at::manual_seed(5);
  for_each_param(c, w, [&](const ParamInfo& info, Tensor& value) {
    if (info.role == ParamRole::kQuery) value = at::randn_like(value) * 0.5;
    if (info.role == ParamRole::kRouterBias) value = at::randn_like(value) * 0.1;
  });
  set_requires_grad(c, w, true);
  return w;
}

std::vector<std::pair<std::string, Tensor>> take_gradients(const ModelConfig& c, ModelWeights& w) {
  std::vector<std::pair<std::string, Tensor>> out;
  for_each_param(c, w, [&](const ParamInfo& info, Tensor& value) {
    if (value.grad().defined()) out.emplace_back(info.name, value.grad().clone());
    value.mutable_grad() = Tensor();
  });
  return out;
}

// A loss at a few tokens of the beginning and a few of the end, as an episode with one long observation has.
struct Case {
  Tensor ids, direction;
  std::vector<int64_t> rows;
  Tensor loss(int64_t begin, const Tensor& hidden) const {
    Tensor sum;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (rows[i] < begin || rows[i] >= begin + hidden.size(0)) continue;
      const Tensor term = (hidden[rows[i] - begin] * direction[static_cast<int64_t>(i)]).sum();
      sum = sum.defined() ? sum + term : term;
    }
    return sum;
  }
};

Case make_case(const ModelConfig& c, int64_t T) {
  at::manual_seed(11);
  Case out{
      .ids = at::randint(c.vocab_size - 1, {T}, at::kLong), .direction = {}, .rows = {3, 4, T - 2, T - 1}};
  out.ids[4] = c.vocab_size - 1;  // nowhere else: its embedding's gradient is that of the first decision
  out.direction = at::randn({4, c.hidden});
  return out;
}

class Segments : public ::testing::TestWithParam<test::NamedConfig> {};

TEST_P(Segments, GradientIsThatOfTheWholeGraph) {
  const ModelConfig& c = GetParam().config;
  ModelWeights w = weights_of(c);
  for (const int64_t T : {64, 65, 200}) {
    const Case one = make_case(c, T);
    const Tensor hidden = forward_hidden(c, w, {one.ids, make_cu_seqlens({T})});
    torch::autograd::backward({one.loss(0, hidden)}, {});
    const auto expected = take_gradients(c, w);

    SegmentedSequence sequence(c, w, one.ids, 64);
    std::vector<Tensor> parts;
    sequence.forward([&](int64_t begin, const Tensor& h) {
      EXPECT_EQ(begin, static_cast<int64_t>(parts.size()) * 64);
      EXPECT_FALSE(h.requires_grad());
      parts.push_back(h);
    });
    EXPECT_TRUE(test::close(at::cat(parts), hidden, test::kFp32Model)) << T;
    sequence.backward([&](int64_t begin, const Tensor& h) { return one.loss(begin, h); });
    const auto actual = take_gradients(c, w);
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) {
      EXPECT_EQ(actual[i].first, expected[i].first);
      EXPECT_TRUE(test::close(actual[i].second, expected[i].second, test::kFp32Model))
          << actual[i].first << " of " << T;
    }
  }
}

// What the end of the sequence says about its first decision, alone: without the loss there.
TEST_P(Segments, CreditReachesTheFirstDecision) {
  const ModelConfig& c = GetParam().config;
  ModelWeights w = weights_of(c);
  const int64_t T = 300;
  Case one = make_case(c, T);
  one.rows = {T - 2, T - 1};
  const Tensor hidden = forward_hidden(c, w, {one.ids, make_cu_seqlens({T})});
  torch::autograd::backward({one.loss(0, hidden)}, {});
  const Tensor expected = w.embed.grad()[c.vocab_size - 1].clone();
  take_gradients(c, w);
  SegmentedSequence sequence(c, w, one.ids, 128);
  sequence.forward([](int64_t, const Tensor&) {});
  sequence.backward([&](int64_t begin, const Tensor& h) { return one.loss(begin, h); });
  EXPECT_GT(expected.abs().max().item<double>(), 0);
  // Against the largest entry of this small gradient itself, which has passed through 300 tokens.
  EXPECT_TRUE(test::close(w.embed.grad()[c.vocab_size - 1], expected, 10 * test::kFp32Model));
}

INSTANTIATE_TEST_SUITE_P(Tiny, Segments, ::testing::ValuesIn(test::tiny_variants()),
                         [](const auto& info) { return info.param.name; });

TEST(SegmentedSequence, RefusesWhatItCannotCut) {
  const ModelConfig c = test::tiny_config();
  const ModelWeights w = weights_of(c);
  const Tensor ids = at::zeros({10}, at::kLong);
  testing::expect_error([&] { SegmentedSequence(c, w, ids, 100); }, {"100", "multiple of 64"});
  testing::expect_error([&] { SegmentedSequence(c, w, ids, 0); }, {"multiple of 64"});
  SegmentedSequence sequence(c, w, ids, 64);
  testing::expect_error([&] { sequence.backward([](int64_t, const Tensor&) { return Tensor(); }); },
                        {"before forward"});
}

}  // namespace
}  // namespace godwit
