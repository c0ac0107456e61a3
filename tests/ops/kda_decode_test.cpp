// The fused decode step of a KDA layer against the ops it stands for.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

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
  a.state.requires_grad_(true);
  EXPECT_NE(message(a).find("no gradient"), std::string::npos) << message(a);
}

}  // namespace
}  // namespace godwit::test
