// Short convolution against a plain loop in fp64, gradients against the fp64 composition.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "godwit/ops/ops.h"
#include "godwit/ops/ref/short_conv_ref.h"
#include "tests/ops/kda_cases.h"
#include "tests/support/compare.h"

namespace godwit::test {
namespace {

using at::Tensor;

struct ConvInputs {
  Tensor x, weight;
  std::optional<Tensor> state;
  Tensor cu;
};

ConvInputs random_conv(const std::vector<int64_t>& lengths, int64_t channels, int64_t taps, bool state) {
  const Tensor cu = offsets(lengths);
  ConvInputs in{at::randn({cu[-1].item<int64_t>(), channels}), at::randn({channels, taps}), std::nullopt, cu};
  if (state) in.state = at::randn({static_cast<int64_t>(lengths.size()), channels, taps - 1});
  return in;
}

// y_t = silu(sum_j w_j x_{t-W+1+j}), one output at a time.
std::tuple<Tensor, Tensor> by_hand(const ConvInputs& in) {
  const int64_t taps = in.weight.size(1);
  std::vector<Tensor> ys, states;
  for (int64_t n = 0; n + 1 < in.cu.size(0); ++n) {
    const Tensor x =
        in.x.slice(0, in.cu[n].item<int64_t>(), in.cu[n + 1].item<int64_t>()).to(at::kDouble).t();
    const Tensor past =
        in.state ? (*in.state)[n].to(at::kDouble) : at::zeros({x.size(0), taps - 1}, at::kDouble);
    const Tensor all = at::cat({past, x}, 1);  // [C, W-1+T]
    for (int64_t t = 0; t < x.size(1); ++t) {
      ys.push_back(at::silu((all.narrow(1, t, taps) * in.weight.to(at::kDouble)).sum(1)));
    }
    states.push_back(all.slice(1, x.size(1)));
  }
  return {ys.empty() ? in.x.to(at::kDouble) : at::stack(ys), at::stack(states)};
}

const std::vector<std::vector<int64_t>> kPacks = {
    {0}, {1}, {2}, {3}, {4}, {15}, {16}, {17}, {63}, {65}, {0, 5, 0, 1, 2, 257, 3, 0}};

TEST(ShortConv, MatchesPlainLoop) {
  for (const auto& lengths : kPacks) {
    for (const int64_t channels : {1, 16, 40, 256}) {
      for (const int64_t taps : {1, 3, 4}) {
        for (const bool state : {false, true}) {
          const ConvInputs in = random_conv(lengths, channels, taps, state);
          const auto [y, last] = ops::short_conv(in.x, in.weight, in.state, in.cu);
          const auto [y_ref, last_ref] = by_hand(in);
          EXPECT_TRUE(close(y, y_ref, kFp32)) << channels << " channels, " << taps << " taps";
          EXPECT_TRUE(bit_equal(last, last_ref.to(at::kFloat)))
              << channels << " channels, " << taps << " taps";
        }
      }
    }
  }
}

std::vector<Tensor> conv_grads(const ConvInputs& in, at::ScalarType type, const Tensor& grad_y,
                               const Tensor& grad_state, bool reference) {
  std::vector<Tensor> inputs = {in.x.to(type).detach().requires_grad_(true),
                                in.weight.to(type).detach().requires_grad_(true)};
  std::optional<Tensor> state;
  if (in.state) {
    state = in.state->to(type).detach().requires_grad_(true);
    inputs.push_back(*state);
  }
  const auto [y, last] = reference ? ops::ref::short_conv_ref(inputs[0], inputs[1], state, in.cu)
                                   : ops::short_conv(inputs[0], inputs[1], state, in.cu);
  std::vector<Tensor> outputs = {y}, given = {grad_y.to(type)};
  if (grad_state.defined()) outputs.push_back(last), given.push_back(grad_state.to(type));
  return torch::autograd::grad(outputs, inputs, given);
}

TEST(ShortConv, GradientsMatchFp64) {
  for (const auto& lengths : kPacks) {
    for (const int64_t channels : {1, 16, 40}) {
      for (const int64_t taps : {1, 4}) {
        const ConvInputs in = random_conv(lengths, channels, taps, /*state=*/channels != 16);
        const Tensor grad_y = at::randn(in.x.sizes());
        const Tensor grad_state = at::randn({static_cast<int64_t>(lengths.size()), channels, taps - 1});
        const auto got = conv_grads(in, at::kFloat, grad_y, grad_state, false);
        const auto expected = conv_grads(in, at::kDouble, grad_y, grad_state, true);
        for (size_t i = 0; i < got.size(); ++i) {
          EXPECT_TRUE(close(got[i], expected[i], kFp32Grad))
              << "input " << i << ", " << channels << " channels";
        }
      }
    }
  }
}

TEST(ShortConv, SplitsAndStepsEqualTheWholeBitForBit) {
  const ConvInputs in = random_conv({40}, 48, 4, true);
  const auto [y, last] = ops::short_conv(in.x, in.weight, in.state, in.cu);
  for (int64_t at = 0; at <= 40; ++at) {
    const auto [y1, state1] = ops::short_conv(in.x.slice(0, 0, at), in.weight, in.state, offsets({at}));
    const auto [y2, state2] = ops::short_conv(in.x.slice(0, at), in.weight, state1, offsets({40 - at}));
    EXPECT_TRUE(bit_equal(at::cat({y1, y2}), y)) << "split " << at;
    EXPECT_TRUE(bit_equal(state2, last)) << "split " << at;
  }
}

TEST(ShortConv, PackedEqualsSeparateAndThreadsDoNotMatter) {
  const std::vector<int64_t> lengths = {0, 17, 1, 2, 300, 0};
  const ConvInputs in = random_conv(lengths, 64, 4, true);
  const Tensor grad_y = at::randn(in.x.sizes());
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const auto [y, last] = ops::short_conv(in.x, in.weight, in.state, in.cu);
  const auto grads = conv_grads(in, at::kFloat, grad_y, Tensor(), false);
  at::set_num_threads(3);
  const auto grads3 = conv_grads(in, at::kFloat, grad_y, Tensor(), false);
  for (size_t i = 0; i < grads.size(); ++i) EXPECT_TRUE(bit_equal(grads3[i], grads[i])) << "input " << i;
  at::set_num_threads(before);
  int64_t begin = 0;
  for (size_t n = 0; n < lengths.size(); begin += lengths[n++]) {
    const int64_t i = static_cast<int64_t>(n), end = begin + lengths[n];
    const auto [y1, last1] = ops::short_conv(in.x.slice(0, begin, end), in.weight, in.state->narrow(0, i, 1),
                                             offsets({lengths[n]}));
    EXPECT_TRUE(bit_equal(y.slice(0, begin, end), y1)) << "sequence " << n;
    EXPECT_TRUE(bit_equal(last.narrow(0, i, 1), last1)) << "sequence " << n;
  }
}

TEST(ShortConv, Bf16KeepsInputsExactly) {
  ConvInputs in = random_conv({9, 2}, 32, 4, false);
  in.x = in.x.to(at::kBFloat16);
  const auto [y, last] = ops::short_conv(in.x, in.weight, std::nullopt, in.cu);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  EXPECT_EQ(last.scalar_type(), at::kBFloat16);
  const auto [y_ref, last_ref] = by_hand(in);
  EXPECT_TRUE(close(y, y_ref, kBf16));
  EXPECT_TRUE(bit_equal(last.to(at::kDouble), last_ref));
}

TEST(ShortConv, RefusesWrongArguments) {
  const ConvInputs in = random_conv({9, 2}, 8, 4, true);
  EXPECT_THROW(ops::short_conv(in.x, in.weight.narrow(0, 0, 4), in.state, in.cu), c10::Error);
  EXPECT_THROW(ops::short_conv(in.x, in.weight, in.state->narrow(2, 0, 2), in.cu), c10::Error);
  EXPECT_THROW(ops::short_conv(in.x, in.weight, in.state, offsets({9, 3})), c10::Error);
  EXPECT_THROW(ops::short_conv(in.x, in.weight.to(at::kBFloat16), in.state, in.cu), c10::Error);
}

}  // namespace
}  // namespace godwit::test
