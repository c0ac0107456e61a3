#include "godwit/train/optimizer.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "godwit/base/check.h"
#include "godwit/ops/ops.h"
#include "tests/support/compare.h"

namespace godwit {
namespace {

using at::Tensor;
using test::bit_equal;
using test::close;
using ::testing::HasSubstr;

Tensor randn(at::IntArrayRef shape, at::ScalarType type = at::kDouble) {
  return at::randn(shape, at::dtype(at::kDouble)).to(type);
}

OptimizerParam param(const std::string& name, ParamRole role, const Tensor& value, int64_t head_rows = 0,
                     bool weight_decay = true) {
  OptimizerParam out;
  out.info.name = name;
  out.info.role = role;
  out.info.head_rows = head_rows;
  out.info.weight_decay = weight_decay;
  out.value = value.clone();
  out.grad = at::zeros_like(value);
  return out;
}

// ---- written-out references, fp64
// ---------------------------------------------------------------------------

Tensor reference_orthogonal(Tensor m, int64_t steps) {
  const bool tall = m.size(0) > m.size(1);
  if (tall) m = m.t();
  Tensor x = m / (m.norm() + 1e-7);
  for (int64_t i = 0; i < steps; ++i) {
    const Tensor a = x.mm(x.t());
    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a.mm(a)).mm(x);
  }
  return tall ? x.t() : x;
}

struct ReferenceMuon {
  Tensor weight, momentum;
  void step(const Tensor& grad, const OptimizerOptions& o, double lr) {
    momentum = o.momentum * momentum + grad;
    const Tensor u = o.nesterov ? grad + o.momentum * momentum : momentum;
    const double scale = o.update_scale * std::sqrt(std::max(u.size(0), u.size(1)));
    weight = weight - lr * o.weight_decay * weight - lr * scale * reference_orthogonal(u, o.ns_steps);
  }
};

struct ReferenceAdamW {
  Tensor weight, m, v;
  int64_t t = 0;
  void step(const Tensor& grad, const OptimizerOptions& o, double lr, double decay) {
    ++t;
    m = o.beta1 * m + (1 - o.beta1) * grad;
    v = o.beta2 * v + (1 - o.beta2) * grad * grad;
    const Tensor m_hat = m / (1 - std::pow(o.beta1, t)), v_hat = v / (1 - std::pow(o.beta2, t));
    weight = weight - lr * decay * weight - lr * m_hat / (v_hat.sqrt() + o.eps);
  }
};

OptimizerOptions options() {
  return {.muon_lr = 0.02, .adamw_lr = 0.01, .grad_clip = 0};
}

// ---- Newton-Schulz
// ------------------------------------------------------------------------------------------

TEST(NewtonSchulz, SingularValuesEndNearOne) {
  at::manual_seed(1);
  for (const auto& [r, c] : {std::pair{16, 16}, {16, 40}, {40, 16}, {1, 8}, {8, 1}, {1, 1}}) {
    Tensor batch = randn({3, r, c}, at::kFloat);
    ops::newton_schulz_(batch, 5);
    const Tensor s = at::linalg_svdvals(batch);
    EXPECT_LT(s.max().item<float>(), 1.25f) << r << "x" << c;
    if (r != c) {
      EXPECT_GT(s.min().item<float>(), 0.6f) << r << "x" << c;  // square Gaussians have tiny ones
    }
  }
}

TEST(NewtonSchulz, EachMatrixOfABatchIsItsOwn) {
  at::manual_seed(2);
  for (const auto& [r, c] : {std::pair{5, 9}, {9, 5}}) {
    const Tensor input = randn({4, r, c});
    input[2].zero_();
    Tensor batch = input.clone();
    ops::newton_schulz_(batch, 5);
    for (int i = 0; i < 4; ++i) EXPECT_TRUE(close(batch[i], reference_orthogonal(input[i], 5), test::kFp64));
    EXPECT_TRUE(bit_equal(batch[2], at::zeros_like(batch[2])));
  }
  Tensor empty = at::zeros({0, 3, 4});
  ops::newton_schulz_(empty, 5);
}

// ---- steps against the references
// ---------------------------------------------------------------------------

class OptimizerDtype : public ::testing::TestWithParam<std::pair<at::ScalarType, double>> {};

TEST_P(OptimizerDtype, MuonAndAdamWMatchTheWrittenOutSteps) {
  const auto [type, tolerance] = GetParam();
  for (const bool nesterov : {true, false}) {
    at::manual_seed(3);
    OptimizerOptions o = options();
    o.nesterov = nesterov;
    const Tensor matrix = randn({6, 10}), experts = randn({3, 8, 4}), norm = randn({7}),
                 decay = randn({2, 3});
    std::vector<OptimizerParam> params = {
        param("m", ParamRole::kMatrix, matrix.to(type)), param("e", ParamRole::kExperts, experts.to(type)),
        param("n", ParamRole::kNorm, norm.to(type)), param("d", ParamRole::kDecay, decay.to(type), 0, false)};
    Optimizer optimizer(o, params);
    ReferenceMuon m{matrix, at::zeros_like(matrix)};
    std::vector<ReferenceMuon> e;
    for (int i = 0; i < 3; ++i) e.push_back({experts[i], at::zeros_like(experts[i])});
    ReferenceAdamW n{norm, at::zeros_like(norm), at::zeros_like(norm)};
    ReferenceAdamW d{decay, at::zeros_like(decay), at::zeros_like(decay)};
    for (int step = 0; step < 3; ++step) {
      const double lr = 1.0 / (step + 1);
      std::vector<Tensor> grads = {randn({6, 10}), randn({3, 8, 4}), randn({7}), randn({2, 3})};
      for (int i = 0; i < 4; ++i) params[i].grad.copy_(grads[i]);
      EXPECT_TRUE(optimizer.step(lr).applied);
      m.step(grads[0], o, lr * o.muon_lr);
      for (int i = 0; i < 3; ++i) e[i].step(grads[1][i], o, lr * o.muon_lr);
      n.step(grads[2], o, lr * o.adamw_lr, o.weight_decay);
      d.step(grads[3], o, lr * o.adamw_lr, 0);
      EXPECT_TRUE(close(params[0].value, m.weight, tolerance));
      EXPECT_TRUE(close(params[1].value, at::stack({e[0].weight, e[1].weight, e[2].weight}), tolerance));
      EXPECT_TRUE(close(params[2].value, n.weight, tolerance));
      EXPECT_TRUE(close(params[3].value, d.weight, tolerance));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, OptimizerDtype,
                         ::testing::Values(std::pair{at::kDouble, test::kFp64},
                                           std::pair{at::kFloat, test::kFp32Chain}));

TEST(Optimizer, PerHeadEqualsSeparateMatrices) {
  at::manual_seed(4);
  const Tensor value = randn({12, 5}), grad = randn({12, 5});
  std::vector<OptimizerParam> together = {param("q", ParamRole::kMatrix, value, /*head_rows=*/4)};
  std::vector<OptimizerParam> apart, whole = {param("q", ParamRole::kMatrix, value, 4)};
  for (int h = 0; h < 3; ++h)
    apart.push_back(param("q" + std::to_string(h), ParamRole::kMatrix, value.narrow(0, 4 * h, 4)));
  OptimizerOptions o = options();
  Optimizer a(o, together), b(o, apart);
  o.per_head = false;
  Optimizer c(o, whole);
  together[0].grad.copy_(grad);
  whole[0].grad.copy_(grad);
  for (int h = 0; h < 3; ++h) apart[h].grad.copy_(grad.narrow(0, 4 * h, 4));
  a.step(1);
  b.step(1);
  c.step(1);
  const Tensor separate = at::cat({apart[0].value, apart[1].value, apart[2].value});
  EXPECT_TRUE(close(together[0].value, separate, test::kFp64));
  EXPECT_FALSE(close(whole[0].value, separate, 1e-3));
  EXPECT_DOUBLE_EQ(a.rules()[0].scale, 0.2 * std::sqrt(5.0));   // of the block, 4 x 5
  EXPECT_DOUBLE_EQ(c.rules()[0].scale, 0.2 * std::sqrt(12.0));  // of the whole, 12 x 5
}

// One expert split over many Newton-Schulz batches, and several matrices in one, must not change the result.
TEST(Optimizer, BatchingDoesNotChangeTheStep) {
  at::manual_seed(5);
  const Tensor experts = randn({7, 4, 6}), m1 = randn({4, 6}), m2 = randn({8, 6});
  std::vector<Tensor> results;
  const std::vector<Tensor> grads = {randn({7, 4, 6}), randn({4, 6}), randn({8, 6})};
  for (const int64_t elements : {1, 3 * 24, 1 << 20}) {
    std::vector<OptimizerParam> params = {param("a", ParamRole::kMatrix, m1),
                                          param("e", ParamRole::kExperts, experts),
                                          param("b", ParamRole::kMatrix, m2, 4)};
    Optimizer optimizer(options(), params, elements);
    params[0].grad.copy_(grads[1]);
    params[1].grad.copy_(grads[0]);
    params[2].grad.copy_(grads[2]);
    optimizer.step(1);
    results.push_back(
        at::cat({params[0].value.flatten(), params[1].value.flatten(), params[2].value.flatten()}));
  }
  EXPECT_TRUE(close(results[1], results[0], test::kFp64));
  EXPECT_TRUE(close(results[2], results[0], test::kFp64));
}

// Small fp32 blocks go through the cache in chunks, larger ones through whole-tensor operations.
TEST(Optimizer, SmallAndLargeFp32BlocksMatchTheReference) {
  at::manual_seed(10);
  OptimizerOptions o = options();
  o.grad_clip = 3;  // clips
  // 32 x 64: eight blocks a chunk, so 37 end in a short one. 130 x 140: beyond the small kernel.
  const Tensor experts = randn({37, 32, 64}, at::kFloat), large = randn({130, 140}, at::kFloat);
  const Tensor grad_e = randn({37, 32, 64}, at::kFloat), grad_l = randn({130, 140}, at::kFloat);
  for (const bool bf16 : {false, true}) {
    const at::ScalarType type = bf16 ? at::kBFloat16 : at::kFloat;
    std::vector<OptimizerParam> params = {param("e", ParamRole::kExperts, experts.to(type)),
                                          param("l", ParamRole::kMatrix, large.to(type))};
    Optimizer optimizer(o, params);
    params[0].grad.copy_(grad_e);
    params[1].grad.copy_(grad_l);
    const double norm = optimizer.step(1).grad_norm;
    const auto expected = [&](const Tensor& value, const Tensor& grad) {
      ReferenceMuon m{value.to(type).to(at::kDouble), at::zeros(value.sizes(), at::kDouble)};
      m.step(grad.to(type).to(at::kDouble) * (3 / norm), o, o.muon_lr);
      return m.weight;
    };
    const double tolerance = bf16 ? test::kBf16 : test::kFp32Chain;
    for (const int64_t i : {0, 7, 8, 36})
      EXPECT_TRUE(close(params[0].value[i], expected(experts[i], grad_e[i]), tolerance)) << i;
    EXPECT_TRUE(close(params[1].value, expected(large, grad_l), tolerance));
  }
}

TEST(Optimizer, ASmallBlockDoesNotDependOnItsNeighbours) {
  at::manual_seed(11);
  const Tensor experts = randn({37, 16, 24}, at::kFloat), grad = randn({37, 16, 24}, at::kFloat);
  std::vector<OptimizerParam> together = {param("e", ParamRole::kExperts, experts)};
  std::vector<OptimizerParam> alone = {param("e", ParamRole::kMatrix, experts[20])};
  Optimizer a(options(), together), b(options(), alone);
  together[0].grad.copy_(grad);
  alone[0].grad.copy_(grad[20]);
  a.step(1);
  b.step(1);
  EXPECT_TRUE(bit_equal(together[0].value[20], alone[0].value));
}

// ---- who gets what
// ------------------------------------------------------------------------------------------

TEST(Optimizer, RolesDecideNotShapes) {
  const Tensor square = at::ones({8, 8});
  const std::vector<std::pair<ParamRole, bool>> roles = {
      {ParamRole::kMatrix, true}, {ParamRole::kEmbedding, false}, {ParamRole::kHead, false},
      {ParamRole::kConv, false},  {ParamRole::kNorm, false},      {ParamRole::kDecay, false},
      {ParamRole::kQuery, false},
  };
  std::vector<OptimizerParam> params;
  for (const auto& [role, muon] : roles) params.push_back(param(std::to_string(params.size()), role, square));
  params.push_back(param("experts", ParamRole::kExperts, at::ones({2, 8, 8})));
  params.push_back(param("bias", ParamRole::kRouterBias, at::ones({8})));
  for (auto& p : params) p.grad.fill_(1);
  Optimizer optimizer(options(), params);
  const auto rules = optimizer.rules();
  ASSERT_EQ(rules.size(), roles.size() + 1);  // none for the router's bias
  for (size_t i = 0; i < roles.size(); ++i) EXPECT_EQ(rules[i].muon, roles[i].second) << i;
  EXPECT_TRUE(rules.back().muon);
  EXPECT_EQ(rules.back().blocks, 2);
  optimizer.step(1);
  EXPECT_TRUE(bit_equal(params.back().value, at::ones({8})));
}

TEST(Optimizer, RefusesWrongRegistrations) {
  EXPECT_THROW(Optimizer(options(), {param("x", ParamRole::kMatrix, at::ones({2, 3, 4}))}), Error);
  EXPECT_THROW(Optimizer(options(), {param("x", ParamRole::kExperts, at::ones({2, 3}))}), Error);
  EXPECT_THROW(Optimizer(options(), {param("x", ParamRole::kMatrix, at::ones({10, 3}), 4)}), Error);
  EXPECT_THROW(Optimizer(options(), {param("x", ParamRole::kNorm, at::ones({3})),
                                     param("x", ParamRole::kNorm, at::ones({3}))}),
               Error);
}

TEST(Optimizer, AParameterWithoutGradientIsLeftAlone) {
  std::vector<OptimizerParam> params = {param("m", ParamRole::kMatrix, at::ones({2, 2})),
                                        param("n", ParamRole::kNorm, at::ones({2}))};
  for (auto& p : params) p.grad = Tensor();
  Optimizer optimizer(options(), params);
  const OptimizerStep step = optimizer.step(1);
  EXPECT_TRUE(step.applied);
  EXPECT_EQ(step.grad_norm, 0);
  EXPECT_TRUE(bit_equal(params[0].value, at::ones({2, 2})));
  EXPECT_TRUE(bit_equal(params[1].value, at::ones({2})));
}

TEST(Optimizer, ReadsAutogradsGradient) {
  Tensor w = at::ones({3, 3}).requires_grad_(true);
  OptimizerParam owned;
  owned.info.name = "w";
  owned.value = w;
  Optimizer optimizer(options(), {owned});
  (w * w).sum().backward();
  EXPECT_DOUBLE_EQ(optimizer.step(1).grad_norm, 6);  // nine gradients of 2
  EXPECT_FALSE(bit_equal(w.detach(), at::ones({3, 3})));
}

// ---- masters, clipping, faults
// ------------------------------------------------------------------------------

TEST(Optimizer, MastersKeepWhatBf16WouldLose) {
  OptimizerOptions o = options();
  o.weight_decay = 0;
  o.adamw_lr = 1e-4;
  std::vector<OptimizerParam> params = {param("n", ParamRole::kNorm, at::ones({4}, at::kBFloat16))};
  Optimizer optimizer(o, params);
  for (int i = 0; i < 100; ++i) {
    params[0].grad.fill_(1);
    optimizer.step(1);  // each step is 1e-4, a fortieth of bf16's spacing at 1
  }
  EXPECT_TRUE(close(params[0].value, at::full({4}, 0.99), test::kBf16 / 4));
  EXPECT_LT(params[0].value.max().item<double>(), 0.993);
}

TEST(Optimizer, ClipsTheGlobalNorm) {
  OptimizerOptions o = options();
  o.grad_clip = 2.5;
  std::vector<OptimizerParam> params = {param("a", ParamRole::kNorm, at::zeros({1})),
                                        param("b", ParamRole::kMatrix, at::zeros({1, 1}))};
  Optimizer optimizer(o, params);
  params[0].grad.fill_(3);
  params[1].grad.fill_(4);
  EXPECT_DOUBLE_EQ(optimizer.step(1).grad_norm, 5);
  // What the state saw is half the gradient; the gradient itself is untouched.
  StateMap state = collect_state([&](const StateVisitor& v) { optimizer.for_each_state(v); });
  EXPECT_FLOAT_EQ(state.at("a.exp_avg").item<float>(), 0.1f * 1.5f);
  EXPECT_FLOAT_EQ(state.at("b.momentum").item<float>(), 2.f);
  EXPECT_FLOAT_EQ(params[1].grad.item<float>(), 4.f);
  params[0].grad.zero_();
  params[1].grad.fill_(2.5);  // just at the limit
  EXPECT_DOUBLE_EQ(optimizer.step(1).grad_norm, 2.5);
  EXPECT_FLOAT_EQ(state.at("b.momentum").item<float>(), 0.95f * 2 + 2.5f);
}

TEST(Optimizer, ANonFiniteGradientChangesNothingAndIsNamed) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    at::manual_seed(6);
    std::vector<OptimizerParam> params = {param("first", ParamRole::kNorm, at::ones({4})),
                                          param("second", ParamRole::kMatrix, at::ones({4, 4})),
                                          param("third", ParamRole::kNorm, at::ones({4}))};
    Optimizer optimizer(options(), params);
    for (auto& p : params) p.grad.fill_(1);
    optimizer.step(1);
    StateMap before = collect_state([&](const StateVisitor& v) { optimizer.for_each_state(v); });
    for (auto& [name, tensor] : before) tensor = tensor.clone();
    const Tensor value = params[1].value.clone();
    params[1].grad[2][3] = bad;
    params[2].grad[0] = bad;
    const OptimizerStep step = optimizer.step(1);
    EXPECT_FALSE(step.applied);
    EXPECT_EQ(step.not_finite, "second");
    EXPECT_TRUE(bit_equal(params[1].value, value));
    optimizer.for_each_state(
        [&](const std::string& name, Tensor& t) { EXPECT_TRUE(bit_equal(t, before.at(name))); });
  }
}

TEST(Optimizer, ScaleRowsReachesTheMaster) {
  std::vector<OptimizerParam> params = {param("w", ParamRole::kMatrix, at::ones({2, 3}, at::kBFloat16))};
  Optimizer optimizer(options(), params);
  const Tensor factors = at::tensor({0.3f, 2.f});
  optimizer.scale_rows("w", factors);
  const Tensor expected = factors.unsqueeze(1).expand({2, 3});
  EXPECT_TRUE(bit_equal(params[0].value, expected.to(at::kBFloat16)));
  optimizer.for_each_state([&](const std::string& name, Tensor& t) {
    if (name == "w.master") {
      EXPECT_TRUE(bit_equal(t, expected));
    }
  });
  EXPECT_THROW(optimizer.scale_rows("v", factors), Error);
}

// ---- resume
// -------------------------------------------------------------------------------------------------

std::vector<OptimizerParam> small_model() {
  at::manual_seed(7);
  return {param("m", ParamRole::kMatrix, randn({8, 6}, at::kBFloat16), 2),
          param("e", ParamRole::kExperts, randn({3, 4, 6}, at::kFloat)),
          param("emb", ParamRole::kEmbedding, randn({5, 4}, at::kBFloat16))};
}

void run(Optimizer& optimizer, std::vector<OptimizerParam>& params, int from, int to) {
  for (int step = from; step < to; ++step) {
    at::manual_seed(100 + step);
    for (auto& p : params) p.grad.copy_(randn(p.grad.sizes()));
    optimizer.step(1.0 / (1 + step));
  }
}

TEST(Optimizer, ResumesBitForBit) {
  auto straight = small_model();
  Optimizer a(options(), straight);
  run(a, straight, 0, 3);
  StateMap saved = collect_state([&](const StateVisitor& v) { a.for_each_state(v); });
  std::vector<Tensor> weights;
  for (auto& [name, tensor] : saved) tensor = tensor.clone();
  for (auto& p : straight) weights.push_back(p.value.clone());
  run(a, straight, 3, 6);

  auto resumed = small_model();
  for (size_t i = 0; i < weights.size(); ++i) resumed[i].value.copy_(weights[i]);
  Optimizer b(options(), resumed);
  b.load_state(saved);
  run(b, resumed, 3, 6);
  for (size_t i = 0; i < weights.size(); ++i) EXPECT_TRUE(bit_equal(resumed[i].value, straight[i].value));
}

TEST(Optimizer, LoadingIsStrict) {
  auto params = small_model();
  Optimizer optimizer(options(), params);
  const StateMap saved = collect_state([&](const StateVisitor& v) { optimizer.for_each_state(v); });
  EXPECT_EQ(saved.size(), 2u + 1u + 4u);
  const auto error_of = [&](const StateMap& map) -> std::string {
    try {
      optimizer.load_state(map);
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(error_of(saved), "no error");
  StateMap less = saved;
  less.erase("m.momentum");
  EXPECT_THAT(error_of(less), HasSubstr("the saved state lacks m.momentum"));
  StateMap more = saved;
  more["x.momentum"] = at::zeros({1});
  EXPECT_THAT(error_of(more), HasSubstr("x.momentum"));
  StateMap other = saved;
  other["e.momentum"] = at::zeros({3, 4, 5});
  EXPECT_THAT(error_of(other), HasSubstr("e.momentum: expected Float [3, 4, 6]"));
}

}  // namespace
}  // namespace godwit
