// The KDA layer on a GPU in bf16, forward and backward, against the same layer in fp64 on the CPU. Skipped
// where there is no GPU.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "godwit/model/layers.h"
#include "tests/model/tiny.h"
#include "tests/support/compare.h"

namespace godwit::test {
namespace {

using at::Tensor;

constexpr int64_t kHidden = 64, kHeads = 2, kWidth = 128, kWide = kHeads * kWidth;

std::vector<Tensor*> fields(KdaWeights& w) {
  return {&w.q_proj, &w.k_proj, &w.v_proj, &w.q_conv,  &w.k_conv, &w.v_conv, &w.f_a,
          &w.f_b,    &w.b_proj, &w.A_log,  &w.dt_bias, &w.g_proj, &w.o_norm, &w.o_proj};
}

// Values that bf16 holds exactly, so that both sides see the same weights.
KdaWeights random_weights() {
  const auto matrix = [](at::IntArrayRef sizes, double size) {
    return (at::randn(sizes) * size).to(at::kBFloat16).to(at::kFloat);
  };
  const double in = 1.0 / 8;  // 1 / sqrt(kHidden)
  KdaWeights w;
  for (Tensor* t : {&w.q_proj, &w.k_proj, &w.v_proj, &w.g_proj}) *t = matrix({kWide, kHidden}, in);
  for (Tensor* t : {&w.q_conv, &w.k_conv, &w.v_conv}) *t = matrix({kWide, 4}, 0.5);
  w.f_a = matrix({kWidth, kHidden}, in), w.f_b = matrix({kWide, kWidth}, in);
  w.b_proj = matrix({kHeads, kHidden}, in);
  w.A_log = matrix({kHeads}, 0.3), w.dt_bias = matrix({kWide}, 0.5) - 2;
  w.o_norm = matrix({kWidth}, 0.1) + 1;
  w.o_proj = matrix({kHidden, kWide}, 1.0 / 16);
  return w;
}

// Leaves on `device`; matrices in `type`, what the model keeps in fp32 in `kept`.
KdaWeights placed(KdaWeights w, at::Device device, at::ScalarType type, at::ScalarType kept) {
  for (Tensor* t : fields(w)) {
    const bool keep = t == &w.q_conv || t == &w.k_conv || t == &w.v_conv || t == &w.A_log ||
                      t == &w.dt_bias || t == &w.o_norm;
    if (t->defined()) *t = t->detach().to(device, keep ? kept : type).requires_grad_(true);
  }
  return w;
}

ModelConfig layer_config(double bound) {
  ModelConfig c = tiny_config();
  c.hidden = kHidden;
  c.kda.heads = kHeads, c.kda.head_dim = kWidth, c.kda.gate_lower_bound = bound;
  return c;
}

TEST(KdaLayerCuda, Bf16MatchesFp64) {
  if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no GPU";
  for (const double bound : {-5.0, 0.0}) {
    const ModelConfig config = layer_config(bound);
    const KdaWeights weights = random_weights();
    const Tensor cu = at::tensor({0, 17, 17, 130, 200}, at::kLong);
    const Tensor x = at::randn({200, kHidden}).to(at::kBFloat16),
                 dy = at::randn({200, kHidden}).to(at::kBFloat16);
    const auto run = [&](at::Device device, at::ScalarType type, at::ScalarType kept) {
      KdaWeights w = placed(weights, device, type, kept);
      std::vector<Tensor> inputs = {x.to(device, type).detach().requires_grad_(true)};
      for (Tensor* t : fields(w)) inputs.push_back(*t);
      const Tensor y = kda_layer(config, w, inputs[0], cu, nullptr, nullptr);
      auto out = torch::autograd::grad({y}, inputs, {dy.to(device, type)});
      out.insert(out.begin(), y);
      return out;
    };
    const auto got = run(at::kCUDA, at::kBFloat16, at::kFloat);
    const auto want = run(at::kCPU, at::kDouble, at::kDouble);
    // Every activation between the ops is rounded to bf16 too, so the limits are those of a chain of ops.
    for (size_t i = 0; i < got.size(); ++i)
      EXPECT_TRUE(close_norm(got[i], want[i], 2 * kBf16Grad)) << "tensor " << i << ", bound " << bound;
  }
}

}  // namespace
}  // namespace godwit::test
