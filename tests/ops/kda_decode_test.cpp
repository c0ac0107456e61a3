// The fused decode step of a KDA layer against the ops it stands for.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <vector>

#include "godwit/ops/ops.h"
#include "tests/support/compare.h"

namespace godwit::test {
namespace {

using at::Tensor;

ops::KdaDecodeArgs random_step(int64_t N, int64_t H, int64_t K) {
  const int64_t C = H * K;
  ops::KdaDecodeArgs a;
  for (Tensor* t : {&a.q, &a.k, &a.v, &a.z, &a.gate}) *t = at::randn({N, C});
  a.b = at::randn({N, H});
  for (Tensor* t : {&a.q_conv, &a.k_conv, &a.v_conv}) *t = at::randn({C, 4}) * 0.5;
  a.A_log = at::randn({H}) * 0.3, a.dt_bias = at::randn({H, K}), a.o_norm = at::randn({K}) * 0.1 + 1;
  a.gate_bound = -5.0, a.norm_eps = 1e-5;
  for (Tensor* t : {&a.conv_q, &a.conv_k, &a.conv_v}) *t = at::randn({N, C, 3});
  a.state = at::randn({N, H, K, K});
  return a;
}

// Steps with carried states equal one pass of the ops over all tokens.
TEST(KdaDecode, EqualsTheOpsOneByOne) {
  const at::NoGradGuard no_grad;
  const int64_t N = 3, H = 2, K = 16, steps = 5;
  ops::KdaDecodeArgs a = random_step(N, H, K);
  Tensor conv[3] = {a.conv_q.clone(), a.conv_k.clone(), a.conv_v.clone()}, state = a.state.clone();
  const Tensor weights[3] = {a.q_conv, a.k_conv, a.v_conv}, each = at::arange(N + 1, at::kLong);
  for (int64_t step = 0; step < steps; ++step) {
    const ops::KdaDecodeArgs fresh = random_step(N, H, K);
    a.q = fresh.q, a.k = fresh.k, a.v = fresh.v, a.z = fresh.z, a.gate = fresh.gate, a.b = fresh.b;
    const Tensor y = ops::kda_decode(a);
    Tensor x[3] = {a.q, a.k, a.v};
    for (int i = 0; i < 3; ++i) {
      std::tie(x[i], conv[i]) = ops::short_conv(x[i], weights[i], conv[i], each);
      x[i] = x[i].view({N, H, K});
    }
    const Tensor o =
        ops::kda_step(x[0], x[1], x[2], a.z.view({N, H, K}), a.A_log, a.dt_bias, a.b, a.gate_bound, state);
    const Tensor want = ops::rms_norm_gated(o, a.gate.view({N, H, K}), a.o_norm, a.norm_eps);
    EXPECT_TRUE(bit_equal(y, want.view({N, H * K}))) << "step " << step;
  }
  EXPECT_TRUE(bit_equal(a.state, state));
  EXPECT_TRUE(bit_equal(a.conv_q, conv[0]));
  EXPECT_TRUE(bit_equal(a.conv_k, conv[1]));
  EXPECT_TRUE(bit_equal(a.conv_v, conv[2]));
}

// Several tokens on slots of a larger pool: each sequence's outputs are those of its tokens one by one, its
// states those after `keep` of them; what has no slot, or is not kept, does not change.
TEST(KdaDecode, ManyTokensOnSlots) {
  const at::NoGradGuard no_grad;
  const int64_t H = 2, K = 16, tokens = 3, S = 6;
  const std::vector<int32_t> slots = {4, -1, 0, 2}, keep = {3, 2, 0, 1};
  const auto N = static_cast<int64_t>(slots.size());
  ops::KdaDecodeArgs a = random_step(S, H, K);
  const ops::KdaDecodeArgs fresh = random_step(N * tokens, H, K);
  a.q = fresh.q, a.k = fresh.k, a.v = fresh.v, a.z = fresh.z, a.gate = fresh.gate, a.b = fresh.b;
  a.slots = at::tensor(slots, at::kInt), a.keep = at::tensor(keep, at::kInt), a.tokens = tokens;
  for (Tensor* t : {&a.conv_q, &a.conv_k, &a.conv_v, &a.state}) t->select(0, 5).fill_(NAN);  // nobody's
  ops::KdaDecodeArgs before = a;
  for (Tensor* t : {&before.conv_q, &before.conv_k, &before.conv_v, &before.state}) *t = t->clone();
  const Tensor y = ops::kda_decode(a);
  for (int64_t n = 0; n < N; ++n) {
    if (slots[n] < 0) {
      EXPECT_TRUE(bit_equal(y.narrow(0, n * tokens, tokens), at::zeros({tokens, H * K})));
      continue;
    }
    ops::KdaDecodeArgs one = before;
    for (Tensor* t : {&one.conv_q, &one.conv_k, &one.conv_v, &one.state})
      *t = t->narrow(0, slots[n], 1).clone();
    one.slots = one.keep = std::nullopt, one.tokens = 1;
    for (int64_t m = 0; m < tokens; ++m) {
      const auto row = [&](const Tensor& x) { return x.narrow(0, n * tokens + m, 1); };
      one.q = row(a.q), one.k = row(a.k), one.v = row(a.v), one.z = row(a.z), one.gate = row(a.gate);
      one.b = row(a.b);
      EXPECT_TRUE(bit_equal(ops::kda_decode(one), row(y))) << "sequence " << n << " token " << m;
      if (m + 1 == keep[n]) {
        EXPECT_TRUE(bit_equal(a.state.narrow(0, slots[n], 1), one.state)) << n;
        EXPECT_TRUE(bit_equal(a.conv_k.narrow(0, slots[n], 1), one.conv_k)) << n;
      }
    }
  }
  for (const int64_t row : {0, 1, 3, 5}) {  // kept nothing, or belong to nobody
    EXPECT_TRUE(bit_equal(a.state[row], before.state[row])) << row;
    EXPECT_TRUE(bit_equal(a.conv_q[row], before.conv_q[row])) << row;
  }
}

// A state kept in bf16 is the fp32 one, rounded after each call.
TEST(KdaDecode, StateInBf16) {
  const at::NoGradGuard no_grad;
  ops::KdaDecodeArgs a = random_step(3, 2, 16);
  a.state = a.state.to(at::kBFloat16);
  ops::KdaDecodeArgs full = a;
  full.state = a.state.to(at::kFloat);
  for (Tensor* t : {&full.conv_q, &full.conv_k, &full.conv_v}) *t = t->clone();
  EXPECT_TRUE(bit_equal(ops::kda_decode(a), ops::kda_decode(full)));
  EXPECT_TRUE(bit_equal(a.state, full.state.to(at::kBFloat16)));
  EXPECT_TRUE(bit_equal(a.conv_v, full.conv_v));
}

TEST(KdaDecode, RefusesWrongArguments) {
  const auto message = [](ops::KdaDecodeArgs a) -> std::string {
    try {
      ops::kda_decode(a);
    } catch (const c10::Error& e) {
      return e.what_without_backtrace();
    }
    return "";
  };
  ops::KdaDecodeArgs a = random_step(2, 1, 8);
  a.gate = at::randn({2, 9});
  EXPECT_NE(message(a).find("kda_decode: gate"), std::string::npos) << message(a);
  a = random_step(2, 1, 8);
  a.conv_k = at::randn({2, 8, 2});
  EXPECT_NE(message(a).find("kda_decode: conv_k"), std::string::npos) << message(a);
  a = random_step(2, 1, 8);
  a.slots = at::tensor({1, 1}, at::kInt);
  EXPECT_NE(message(a).find("kda_decode: slots"), std::string::npos) << message(a);
  a = random_step(2, 1, 8);
  a.state.requires_grad_(true);
  EXPECT_NE(message(a).find("no gradient"), std::string::npos) << message(a);
}

}  // namespace
}  // namespace godwit::test
