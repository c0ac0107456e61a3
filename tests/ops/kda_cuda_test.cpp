// The ops on a GPU against the fp64 recurrence on the CPU, with inputs that are exact in bf16. Skipped where
// there is no GPU.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "godwit/ops/ref/short_conv_ref.h"
#include "tests/ops/kda_cases.h"
#include "tests/support/compare.h"

namespace godwit::test {
namespace {

using at::Tensor;
using ops::KdaArgs;

class KdaCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no GPU";
  }
};

// q, k, v, z and b as `type` (b as b_type) on the GPU; the parameters and the state stay fp32.
KdaArgs on_gpu(KdaArgs x, at::ScalarType type = at::kBFloat16, at::ScalarType b_type = at::kBFloat16) {
  for (Tensor* t : {&x.q, &x.k, &x.v, &x.z}) *t = t->to(at::kCUDA, type);
  x.b = x.b.to(at::kCUDA, b_type);
  for (Tensor* t : {&x.A_log, &x.dt_bias}) *t = t->to(at::kCUDA);
  if (x.initial_state.has_value()) x.initial_state = x.initial_state->to(at::kCUDA);
  return x;
}

KdaArgs in_fp64(KdaArgs x) {
  for_each_input(x, [](Tensor& t) { t = t.to(at::kCPU, at::kDouble); });
  return x;
}

const std::vector<KdaCase> kCases = [] {
  std::vector<KdaCase> cases;
  for (const double bound : {-5.0, 0.0}) {
    cases.push_back({{0, 17, 0, 64, 1, 130, 0}, 2, 128, 128, bound, true});
    cases.push_back({{15, 63, 257}, 3, 128, 128, bound, false});
    cases.push_back({{65}, 1, 128, 128, bound, true});
    cases.push_back({{48, 48}, 2, 128, 128, bound, true});
  }
  cases.push_back({{0}, 2, 128, 128, -5.0, true});
  cases.push_back({{2100, 30}, 1, 128, 128, -5.0, true});  // cut into segments
  return cases;
}();

void expect_match(const KdaCase& c, const KdaArgs& x, double value_limit, double grad_limit) {
  const KdaArgs exact = in_fp64(x);
  const Tensor grad_o = at::randn(x.v.sizes()).to(at::kBFloat16).to(at::kFloat);
  const Tensor grad_state =
      at::randn({x.cu_seqlens.numel() - 1, x.q.size(1), x.q.size(2), x.v.size(2)}, at::kFloat);
  const auto [o, state] = chunk(x);
  const auto [o_ref, state_ref] = ops::ref::kda_recurrence_ref(exact);
  EXPECT_EQ(o.scalar_type(), x.v.scalar_type());
  EXPECT_TRUE(close_norm(o, o_ref, value_limit)) << c.name();
  EXPECT_TRUE(close_norm(state, state_ref, value_limit)) << c.name();
  const auto got = kda_grads(x, grad_o.to(x.q.device()), grad_state.to(x.q.device()), chunk);
  const auto want = kda_grads(exact, grad_o, grad_state, ops::ref::kda_recurrence_ref);
  for (size_t i = 0; i < got.size(); ++i) {
    const Tensor expected = want[i].defined() ? want[i] : at::zeros_like(got[i]);
    EXPECT_TRUE(close_norm(got[i], expected, grad_limit)) << kInputNames[i] << ", " << c.name();
  }
}

TEST_F(KdaCuda, Bf16MatchesRecurrence) {
  for (const KdaCase& c : kCases) expect_match(c, on_gpu(random_kda(c)), kBf16Chain, kBf16Grad);
}

TEST_F(KdaCuda, Fp32BetaLogits) {
  const KdaCase& c = kCases[0];
  expect_match(c, on_gpu(random_kda(c), at::kBFloat16, at::kFloat), kBf16Chain, kBf16Grad);
}

// What the kernels do not take goes the plain way, on the GPU.
TEST_F(KdaCuda, OtherTypesAndWidths) {
  const KdaCase fp32{.lengths = {17, 70}, .key = 128, .value = 128};
  expect_match(fp32, on_gpu(random_kda(fp32), at::kFloat, at::kFloat), kFp32Chain, kFp32Chain);
  const KdaCase narrow{.lengths = {17, 70}, .key = 32, .value = 48};
  expect_match(narrow, on_gpu(random_kda(narrow)), kBf16Chain, kBf16Grad);
  const KdaCase steep{.lengths = {40}, .key = 128, .value = 128, .gate_bound = -30.0};
  expect_match(steep, on_gpu(random_kda(steep)), kBf16Chain, kBf16Grad);
}

// Rows of one [T, H, 3 K] tensor, and views at odd offsets: the same bits as dense inputs.
TEST_F(KdaCuda, StridedInputs) {
  const KdaArgs x = on_gpu(random_kda({.lengths = {17, 64}, .key = 128, .value = 128}));
  KdaArgs strided = x;
  const Tensor joined = at::cat({x.q, x.k, x.v}, 2);
  strided.q = joined.narrow(2, 0, 128), strided.k = joined.narrow(2, 128, 128);
  strided.v = joined.narrow(2, 256, 128);
  strided.z =
      at::cat({x.z.reshape(-1).narrow(0, 0, 1), x.z.reshape(-1)}).narrow(0, 1, x.z.numel()).view(x.z.sizes());
  const auto [o, state] = chunk(x);
  const auto [o2, state2] = chunk(strided);
  EXPECT_TRUE(bit_equal(o2, o));
  EXPECT_TRUE(bit_equal(state2, state));
}

// Twice, in another stream, and each sequence alone: the same bits.
TEST_F(KdaCuda, SameBitsAgainAndAlone) {
  const KdaCase c{.lengths = {0, 17, 64, 1, 130, 2100}, .heads = 2, .key = 128, .value = 128};
  const KdaArgs x = on_gpu(random_kda(c));
  const Tensor grad_o = at::randn_like(x.v), grad_state = at::randn_like(*x.initial_state);
  const auto [o, state] = chunk(x);
  const auto grads = kda_grads(x, grad_o, grad_state, chunk);
  const c10::impl::VirtualGuardImpl device(c10::DeviceType::CUDA);
  device.synchronizeDevice(0);
  {
    const c10::StreamGuard side(device.getStreamFromGlobalPool(c10::Device(c10::kCUDA, 0), false));
    const auto [o2, state2] = chunk(x);
    const auto grads2 = kda_grads(x, grad_o, grad_state, chunk);
    device.synchronizeDevice(0);
    EXPECT_TRUE(bit_equal(o2, o));
    EXPECT_TRUE(bit_equal(state2, state));
    for (size_t i = 0; i < grads.size(); ++i) EXPECT_TRUE(bit_equal(grads2[i], grads[i])) << kInputNames[i];
  }
  int64_t begin = 0;
  for (size_t n = 0; n < c.lengths.size(); begin += c.lengths[n++]) {
    const int64_t i = static_cast<int64_t>(n), end = begin + c.lengths[n];
    const KdaArgs one = slice_tokens(x, begin, end, x.initial_state->narrow(0, i, 1));
    const auto [o1, state1] = chunk(one);
    EXPECT_TRUE(bit_equal(o.slice(0, begin, end), o1)) << "sequence " << n;
    EXPECT_TRUE(bit_equal(state.narrow(0, i, 1), state1)) << "sequence " << n;
    const auto grads1 = kda_grads(one, grad_o.slice(0, begin, end), grad_state.narrow(0, i, 1), chunk);
    for (const size_t input : {0, 1, 2, 3, 6})
      EXPECT_TRUE(bit_equal(grads[input].slice(0, begin, end), grads1[input]))
          << kInputNames[input] << " of sequence " << n;
    EXPECT_TRUE(bit_equal(grads[7].narrow(0, i, 1), grads1[7])) << "initial_state of sequence " << n;
  }
}

TEST_F(KdaCuda, StepMatchesRecurrence) {
  for (const double bound : {-5.0, 0.0}) {
    const KdaCase c{{1, 1, 1, 1, 1}, 3, 128, 128, bound, true};
    const KdaArgs x = on_gpu(random_kda(c));
    Tensor state = x.initial_state->clone();
    const Tensor o = step(x, state);
    const auto [o_ref, state_ref] = ops::ref::kda_recurrence_ref(in_fp64(x));
    EXPECT_TRUE(close_norm(o, o_ref, kBf16)) << c.name();
    EXPECT_TRUE(close_norm(state, state_ref, kFp32Chain)) << c.name();
  }
}

// Slots of a pool whose states do not lie densely; a row without a slot starts from zeros.
TEST_F(KdaCuda, StepOnSlots) {
  const KdaArgs x = on_gpu(random_kda({{1, 1, 1}, 2, 128, 128, -5.0, true}));
  for (const std::vector<int64_t>& slots : {std::vector<int64_t>{4, 0, 2}, {3, -1, 1}}) {
    const Tensor pool = at::randn({5, 3, 2, 128, 128}).to(at::kCUDA), before = pool.clone();
    Tensor states = pool.select(1, 1), expected = states.to(at::kCPU, at::kDouble);
    const Tensor index = at::tensor(slots, at::kLong);
    const Tensor o = ops::kda_step(x.q, x.k, x.v, x.z, x.A_log, x.dt_bias, x.b, x.gate_bound, states, index);
    const Tensor want = ops::ref::kda_step_ref(in_fp64(x), expected, index);
    EXPECT_TRUE(close_norm(o, want, kBf16));
    EXPECT_TRUE(close_norm(states, expected, kFp32Chain));
    EXPECT_TRUE(bit_equal(pool.select(1, 0), before.select(1, 0)));
    EXPECT_TRUE(bit_equal(pool.select(1, 2), before.select(1, 2)));
  }
}

// The fused layer step against its composition on the CPU: drafts, slots, states in fp32 and bf16.
TEST_F(KdaCuda, DecodeOnSlots) {
  const at::NoGradGuard no_grad;
  const int64_t H = 3, K = 128, C = H * K, S = 5, N = 4;
  for (const auto& [tokens, type] :
       {std::pair(1, at::kFloat), std::pair(1, at::kBFloat16), std::pair(3, at::kFloat)}) {
    const auto half = [](at::IntArrayRef sizes) { return at::randn(sizes).to(at::kBFloat16); };
    ops::KdaDecodeArgs a;
    for (Tensor* t : {&a.q, &a.k, &a.v, &a.z, &a.gate}) *t = half({N * tokens, C});
    a.b = half({N * tokens, H});
    for (Tensor* t : {&a.q_conv, &a.k_conv, &a.v_conv}) *t = at::randn({C, 4}) * 0.5;
    a.A_log = at::randn({H}) * 0.3, a.dt_bias = at::randn({H, K}), a.o_norm = at::randn({K}) * 0.1 + 1;
    a.gate_bound = -5.0, a.norm_eps = 1e-5, a.tokens = tokens;
    for (Tensor* t : {&a.conv_q, &a.conv_k, &a.conv_v}) *t = half({S, C, 3});
    a.state = (at::randn({S, H, K, K}) * 0.3).to(type);
    a.slots = at::tensor({3, -1, 0, 4}, at::kInt);
    if (tokens > 1) a.keep = at::tensor({2, 1, 0, 3}, at::kInt);
    ops::KdaDecodeArgs gpu = a;
    for (Tensor* t :
         {&gpu.q, &gpu.k, &gpu.v, &gpu.z, &gpu.gate, &gpu.b, &gpu.q_conv, &gpu.k_conv, &gpu.v_conv,
          &gpu.A_log, &gpu.dt_bias, &gpu.o_norm, &gpu.conv_q, &gpu.conv_k, &gpu.conv_v, &gpu.state})
      *t = t->to(at::kCUDA);
    gpu.slots = a.slots->to(at::kCUDA);
    if (a.keep.has_value()) gpu.keep = a.keep->to(at::kCUDA);
    const auto compare = [&](const Tensor& y) {
      EXPECT_TRUE(close_norm(y, ops::kda_decode(a), kBf16Chain)) << tokens;
      EXPECT_TRUE(close_norm(gpu.state, a.state, type == at::kFloat ? 1e-3 : 3e-3))
          << tokens;  // of q, k, v in bf16
      EXPECT_TRUE(bit_equal(gpu.conv_v.cpu(), a.conv_v));
    };
    compare(ops::kda_decode(gpu));
    a.slots = at::tensor({-1, 2, 4, 1}, at::kInt);
    gpu.slots = a.slots->to(at::kCUDA);
    compare(ops::kda_decode(gpu));
  }
}

TEST_F(KdaCuda, ShortConvMatchesReference) {
  for (const std::vector<int64_t>& lengths : {std::vector<int64_t>{0, 5, 0, 1, 2, 257, 3, 0}, {64}, {0}}) {
    for (const bool with_state : {false, true}) {
      const Tensor cu = offsets(lengths);
      const int64_t T = cu[-1].item<int64_t>(), C = 136, N = static_cast<int64_t>(lengths.size());
      const auto bf16 = [](const Tensor& t) { return t.to(at::kCUDA, at::kBFloat16).requires_grad_(true); };
      const auto fp64 = [](const Tensor& t) {
        return t.detach().to(at::kCPU, at::kDouble).requires_grad_(true);
      };
      const Tensor x = bf16(at::randn({T, C})), w = at::randn({C, 4}).to(at::kCUDA).requires_grad_(true);
      std::vector<Tensor> inputs = {x, w}, exact = {fp64(x), fp64(w)};
      std::optional<Tensor> state, exact_state;
      if (with_state) {
        state = bf16(at::randn({N, C, 3})), exact_state = fp64(*state);
        inputs.push_back(*state), exact.push_back(*exact_state);
      }
      const auto [y, last] = ops::short_conv(x, w, state, cu);
      const auto [y_ref, last_ref] = ops::ref::short_conv_ref(exact[0], exact[1], exact_state, cu);
      EXPECT_TRUE(close_norm(y, y_ref, kBf16));
      EXPECT_TRUE(bit_equal(last.to(at::kCPU, at::kDouble), last_ref));
      const Tensor dy = at::randn({T, C}).to(at::kBFloat16), dlast = at::randn({N, C, 3}).to(at::kBFloat16);
      const auto got = torch::autograd::grad({y, last}, inputs, {dy.to(at::kCUDA), dlast.to(at::kCUDA)});
      const auto want =
          torch::autograd::grad({y_ref, last_ref}, exact, {dy.to(at::kDouble), dlast.to(at::kDouble)},
                                std::nullopt, false, /*allow_unused=*/true);
      for (size_t i = 0; i < got.size(); ++i)
        EXPECT_TRUE(close_norm(got[i], want[i].defined() ? want[i] : at::zeros_like(got[i]), kBf16)) << i;
    }
  }
}

}  // namespace
}  // namespace godwit::test
