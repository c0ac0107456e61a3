// KDA against its fp64 recurrence: values, gradients, splits, packs, causality, limits of the gates.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tests/ops/kda_cases.h"
#include "tests/support/compare.h"

namespace godwit::test {
namespace {

using at::Tensor;
using ops::KdaArgs;

std::tuple<Tensor, Tensor> oracle(const KdaArgs& x) {
  const at::NoGradGuard no_grad;
  return ops::ref::kda_recurrence_ref(to_dtype(x, at::kDouble));
}

const std::vector<KdaCase> kCases = [] {
  std::vector<KdaCase> cases;
  for (const double bound : {-5.0, 0.0}) {
    for (const int64_t T : {0, 1, 15, 16, 17, 31, 63, 64, 65, 257}) {
      cases.push_back({.lengths = {T}, .gate_bound = bound, .initial_state = T % 2 == 1});
    }
    cases.push_back({.lengths = {1000}, .key = 128, .value = 128, .gate_bound = bound});
    cases.push_back({.lengths = {0, 17, 0, 64, 1, 130, 0}, .heads = 3, .gate_bound = bound});
    cases.push_back({.lengths = {5, 200}, .key = 16, .value = 96, .gate_bound = bound});
    cases.push_back({.lengths = {70}, .key = 64, .value = 16, .gate_bound = bound});
    cases.push_back({.lengths = {33, 1}, .heads = 1, .key = 24, .value = 40, .gate_bound = bound});
    cases.push_back({.lengths = {40}, .key = 3, .value = 5, .gate_bound = bound});
  }
  cases.push_back({.lengths = {100}, .gate_bound = -30.0});  // a bound that a tile of 16 cannot multiply out
  return cases;
}();

TEST(KdaChunk, MatchesRecurrence) {
  for (const KdaCase& c : kCases) {
    const KdaArgs x = random_kda(c);
    const auto [o, state] = chunk(x);
    const auto [o_ref, state_ref] = oracle(x);
    EXPECT_TRUE(close(o, o_ref, kFp32Chain)) << c.name();
    EXPECT_TRUE(close(state, state_ref, kFp32Chain)) << c.name();
  }
}

TEST(KdaChunk, Fp64MatchesRecurrence) {
  for (const KdaCase& c : kCases) {
    const KdaArgs x = to_dtype(random_kda(c), at::kDouble);
    const auto [o, state] = chunk(x);
    const auto [o_ref, state_ref] = oracle(x);
    EXPECT_TRUE(close(o, o_ref, kFp64)) << c.name();
    EXPECT_TRUE(close(state, state_ref, kFp64)) << c.name();
  }
}

void expect_grads_match(const KdaCase& c, at::ScalarType type, double tolerance, const KdaArgs& x) {
  const Tensor grad_o = at::randn(x.v.sizes());
  const auto [o_ref, state_ref] = oracle(x);
  const Tensor grad_state = at::randn(state_ref.sizes(), at::kFloat);
  const auto got = kda_grads(to_dtype(x, type), grad_o, grad_state, chunk);
  const auto expected = kda_grads(to_dtype(x, at::kDouble), grad_o, grad_state, ops::ref::kda_recurrence_ref);
  for (size_t i = 0; i < got.size(); ++i) {
    // Without a token, the oracle's graph does not reach the inputs. In the kernel's dtype, gradients of shut
    // gates (1e-80 in fp64) are 0.
    const Tensor want = expected[i].defined() ? expected[i].to(type) : at::zeros_like(got[i]);
    EXPECT_TRUE(close(got[i], want, tolerance)) << kInputNames[i] << ", " << c.name();
  }
}

TEST(KdaChunk, GradientsMatchRecurrence) {
  for (const KdaCase& c : kCases) expect_grads_match(c, at::kFloat, kFp32Grad, random_kda(c));
}

TEST(KdaChunk, Fp64GradientsMatchRecurrence) {
  for (const KdaCase& c : kCases) {
    if (c.tokens() <= 257) expect_grads_match(c, at::kDouble, kFp64, random_kda(c));
  }
}

// The oracle itself: directional derivatives by central differences.
TEST(KdaRecurrence, GradientsMatchFiniteDifferences) {
  for (const double bound : {-5.0, 0.0}) {
    const KdaCase c{.lengths = {7, 0, 3}, .key = 4, .value = 3, .gate_bound = bound};
    const KdaArgs x = to_dtype(random_kda(c), at::kDouble);
    const Tensor grad_o = at::randn(x.v.sizes(), at::kDouble);
    const Tensor grad_state = at::randn(x.initial_state->sizes(), at::kDouble);
    const auto grads = kda_grads(x, grad_o, grad_state, ops::ref::kda_recurrence_ref);
    for (size_t i = 0; i < grads.size(); ++i) {
      const Tensor direction = at::randn_like(grads[i]);
      const auto value = [&](double h) {
        KdaArgs moved = x;
        size_t at = 0;
        for_each_input(moved, [&](Tensor& t) {
          if (at++ == i) t = t + direction * h;
        });
        const auto [o, state] = ops::ref::kda_recurrence_ref(moved);
        return ((o * grad_o).sum() + (state * grad_state).sum()).item<double>();
      };
      const double h = 1e-6, numeric = (value(h) - value(-h)) / (2 * h);
      const double analytic = (grads[i] * direction).sum().item<double>();
      const double scale = (grads[i].abs() * direction.abs()).sum().item<double>();
      EXPECT_NEAR(numeric, analytic, kFiniteDiff * scale) << kInputNames[i] << ", bound " << bound;
    }
  }
}

// prefill(a) + prefill(b) and prefill(a) + steps equal the whole, at every split.
TEST(KdaChunk, EverySplitGivesTheSame) {
  for (const double bound : {-5.0, 0.0}) {
    const KdaCase c{.lengths = {70}, .key = 32, .value = 48, .gate_bound = bound};
    const KdaArgs x = random_kda(c);
    const auto [o, state] = chunk(x);
    for (int64_t at = 0; at <= 70; ++at) {
      const auto [o1, state1] = chunk(slice_tokens(x, 0, at, x.initial_state));
      const auto [o2, state2] = chunk(slice_tokens(x, at, 70, state1));
      EXPECT_TRUE(close(at::cat({o1, o2}), o, kFp32Chain)) << "split " << at;
      EXPECT_TRUE(close(state2, state, kFp32Chain)) << "split " << at;
      if (at % 10 != 0) continue;
      Tensor running = state1.clone();
      std::vector<Tensor> outputs = {o1};
      for (int64_t t = at; t < 70; ++t)
        outputs.push_back(step(slice_tokens(x, t, t + 1, std::nullopt), running));
      EXPECT_TRUE(close(at::cat(outputs), o, kFp32Chain)) << "steps from " << at;
      EXPECT_TRUE(close(running, state, kFp32Chain)) << "steps from " << at;
    }
  }
}

TEST(KdaStep, MatchesRecurrence) {
  for (const double bound : {-5.0, 0.0}) {
    for (const auto& [heads, key, value] : {std::tuple(3, 128, 128), {2, 16, 32}, {1, 24, 40}, {2, 3, 5}}) {
      const KdaCase c{
          .lengths = {1, 1, 1, 1, 1}, .heads = heads, .key = key, .value = value, .gate_bound = bound};
      const KdaArgs x = random_kda(c);
      Tensor state = x.initial_state->clone();
      const Tensor o = step(x, state);
      const auto [o_ref, state_ref] = oracle(x);
      EXPECT_TRUE(close(o, o_ref, kFp32)) << c.name();
      EXPECT_TRUE(close(state, state_ref, kFp32)) << c.name();
    }
  }
}

// Rows with slots = the same rows alone on their states, bit for bit; other slots (NaN) are not touched; a
// negative slot is a state of zeros.
TEST(KdaStep, Slots) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Tensor slots = at::tensor({5, -1, 0, 3, -7}, at::kLong);
  for (const auto& [heads, key, value] : {std::tuple(3, 128, 128), {1, 24, 40}}) {
    const KdaCase c{.lengths = {1, 1, 1, 1, 1}, .heads = heads, .key = key, .value = value};
    const KdaArgs x = random_kda(c);
    Tensor states = at::full({7, heads, key, value}, nan), zero = at::zeros({1, heads, key, value});
    for (int64_t n = 0; n < 5; ++n) {
      if (slots[n].item<int64_t>() >= 0) states[slots[n].item<int64_t>()] = (*x.initial_state)[n];
    }
    Tensor expected = states.clone();
    KdaArgs wide = to_dtype(x, at::kDouble);
    Tensor wide_states = states.to(at::kDouble);
    const Tensor o = step(x, states, slots), wide_o = step(wide, wide_states, slots);
    for (int64_t n = 0; n < 5; ++n) {
      const int64_t slot = slots[n].item<int64_t>();
      Tensor state = slot < 0 ? zero.clone() : expected.narrow(0, slot, 1);
      EXPECT_TRUE(bit_equal(o.narrow(0, n, 1), step(slice_tokens(x, n, n + 1, std::nullopt), state))) << n;
    }
    EXPECT_TRUE(bit_equal(states, expected));
    EXPECT_TRUE(close(o, wide_o, kFp32));
    EXPECT_TRUE(close(states.nan_to_num(), wide_states.nan_to_num(), kFp32));
    EXPECT_TRUE(at::isnan(wide_states.index_select(0, at::tensor({1, 2, 4, 6}))).all().item<bool>());
  }
}

TEST(KdaStep, RefusesBadSlots) {
  const KdaArgs x = random_kda({.lengths = {1, 1}});
  Tensor states = at::zeros({3, 2, 32, 32});
  EXPECT_THROW(step(x, states), c10::Error);  // three states for two rows
  EXPECT_THROW(step(x, states, at::tensor({0, 3}, at::kLong)), c10::Error);
  EXPECT_THROW(step(x, states, at::tensor({1, 1}, at::kLong)), c10::Error);
  EXPECT_THROW(step(x, states, at::tensor({0}, at::kLong)), c10::Error);
  EXPECT_THROW(step(x, states, at::tensor({0, 1}, at::kInt)), c10::Error);
}

TEST(KdaChunk, PackedEqualsSeparateBitForBit) {
  const KdaCase c{.lengths = {0, 17, 64, 1, 130, 0, 257}, .heads = 3, .key = 64, .value = 64};
  const KdaArgs x = random_kda(c);
  const Tensor grad_o = at::randn(x.v.sizes()), grad_state = at::randn(x.initial_state->sizes());
  const auto [o, state] = chunk(x);
  const auto grads = kda_grads(x, grad_o, grad_state, chunk);
  int64_t begin = 0;
  for (size_t n = 0; n < c.lengths.size(); begin += c.lengths[n++]) {
    const int64_t i = static_cast<int64_t>(n), end = begin + c.lengths[n];
    const KdaArgs one = slice_tokens(x, begin, end, x.initial_state->narrow(0, i, 1));
    const auto [o1, state1] = chunk(one);
    EXPECT_TRUE(bit_equal(o.slice(0, begin, end), o1)) << "sequence " << n;
    EXPECT_TRUE(bit_equal(state.narrow(0, i, 1), state1)) << "sequence " << n;
    const auto grads1 = kda_grads(one, grad_o.slice(0, begin, end), grad_state.narrow(0, i, 1), chunk);
    for (const size_t input : {0, 1, 2, 3, 6}) {
      EXPECT_TRUE(bit_equal(grads[input].slice(0, begin, end), grads1[input]))
          << kInputNames[input] << " of sequence " << n;
    }
    EXPECT_TRUE(bit_equal(grads[7].narrow(0, i, 1), grads1[7])) << "initial_state of sequence " << n;
  }
}

// A change at token t changes no output before t by a single bit.
TEST(KdaChunk, CausalBitForBit) {
  for (const double bound : {-5.0, 0.0}) {
    const KdaCase c{.lengths = {150}, .heads = 1, .key = 64, .value = 64, .gate_bound = bound};
    const KdaArgs x = random_kda(c);
    const auto [o, state] = chunk(x);
    for (int64_t t = 0; t < 150; t += (t < 66 ? 1 : 7)) {
      KdaArgs changed = x;
      for (Tensor* input : {&changed.q, &changed.k, &changed.v, &changed.z, &changed.b}) {
        *input = input->clone();
        input->slice(0, t).mul_(-3).sub_(4);  // strong gates and keys from t on
      }
      const auto [o2, state2] = chunk(changed);
      EXPECT_TRUE(bit_equal(o2.slice(0, 0, t), o.slice(0, 0, t))) << "token " << t << ", bound " << bound;
    }
  }
}

TEST(KdaChunk, IndependentOfThreadCount) {
  const int before = at::get_num_threads();
  for (const KdaCase& c : {KdaCase{.lengths = {300}, .heads = 1, .key = 128, .value = 128},
                           KdaCase{.lengths = {65, 3, 200}, .heads = 3},
                           KdaCase{.lengths = {300}, .heads = 1, .key = 64, .value = 64, .gate_bound = 0}}) {
    const KdaArgs x = random_kda(c);
    const Tensor grad_o = at::randn(x.v.sizes()), grad_state = at::randn(x.initial_state->sizes());
    at::set_num_threads(1);
    const auto [o1, state1] = chunk(x);
    const auto grads1 = kda_grads(x, grad_o, grad_state, chunk);
    for (const int threads : {2, 3, 7}) {
      at::set_num_threads(threads);
      const auto [o, state] = chunk(x);
      EXPECT_TRUE(bit_equal(o, o1)) << threads << " threads, " << c.name();
      EXPECT_TRUE(bit_equal(state, state1)) << threads << " threads, " << c.name();
      const auto grads = kda_grads(x, grad_o, grad_state, chunk);
      for (size_t i = 0; i < grads.size(); ++i) {
        EXPECT_TRUE(bit_equal(grads[i], grads1[i])) << kInputNames[i] << ", " << threads << " threads";
      }
    }
  }
  at::set_num_threads(before);
}

// Inputs at the edges of their range, alone and mixed with ordinary ones inside a tile.
TEST(KdaChunk, Limits) {
  struct Limit {
    const char* name;
    void (*apply)(KdaArgs&);
  };
  const std::vector<Limit> limits = {
      {"gate open", [](KdaArgs& x) { x.z.fill_(-300); }},
      {"gate shut", [](KdaArgs& x) { x.z.fill_(300); }},
      {"gates at both limits in one tile", [](KdaArgs& x) { x.z.copy_(at::where(x.z > -2, 300.0, -300.0)); }},
      {"gate shut from token 20", [](KdaArgs& x) { x.z.slice(0, 20).fill_(300); }},
      {"steep gate", [](KdaArgs& x) { x.A_log.fill_(3); }},
      {"equal keys, no decay, beta near 1",
       [](KdaArgs& x) {
         x.k.copy_(x.k.slice(0, 0, 1).expand_as(x.k));
         x.z.fill_(-300);
         x.b.fill_(12);
       }},
      {"equal keys alternating in sign",
       [](KdaArgs& x) {
         x.k.copy_(x.k.slice(0, 0, 1).expand_as(x.k));
         x.k.slice(0, 1, c10::nullopt, 2).neg_();
         x.z.fill_(-300);
         x.b.fill_(12);
       }},
      {"zero keys and queries",
       [](KdaArgs& x) {
         x.k.slice(0, 0, 30).zero_();
         x.q.slice(0, 20, 50).zero_();
       }},
      {"keys of norm 30 and 1e-3",
       [](KdaArgs& x) {
         x.k.mul_(30);
         x.k.slice(0, 1, c10::nullopt, 3).mul_(1e-4);
       }},
      {"beta near 0", [](KdaArgs& x) { x.b.fill_(-60); }},
      {"beta near 1", [](KdaArgs& x) { x.b.fill_(60); }},
  };
  for (const double bound : {-5.0, 0.0}) {
    for (const Limit& limit : limits) {
      const KdaCase c{.lengths = {90, 7}, .key = 32, .value = 32, .gate_bound = bound};
      KdaArgs x = random_kda(c);
      limit.apply(x);
      const auto [o, state] = chunk(x);
      const auto [o_ref, state_ref] = oracle(x);
      EXPECT_TRUE(close(o, o_ref, kFp32Chain)) << limit.name << ", " << c.name();
      EXPECT_TRUE(close(state, state_ref, kFp32Chain)) << limit.name << ", " << c.name();
      SCOPED_TRACE(limit.name);
      expect_grads_match(c, at::kFloat, kFp32Grad, x);
    }
  }
}

TEST(KdaChunk, Bf16) {
  const KdaCase c{.lengths = {100, 30}, .key = 64, .value = 64};
  KdaArgs x = random_kda(c);
  for (Tensor* t : {&x.q, &x.k, &x.v, &x.z, &x.b}) *t = t->to(at::kBFloat16);
  const auto [o, state] = chunk(x);
  EXPECT_EQ(o.scalar_type(), at::kBFloat16);
  EXPECT_EQ(state.scalar_type(), at::kFloat);
  const auto [o_ref, state_ref] = oracle(x);
  EXPECT_TRUE(close(o, o_ref, kBf16));
  EXPECT_TRUE(close(state, state_ref, kFp32Chain));
  const auto grads = kda_grads(x, at::ones_like(o), at::ones_like(state), chunk);
  EXPECT_EQ(grads[0].scalar_type(), at::kBFloat16);
  EXPECT_EQ(grads[4].scalar_type(), at::kFloat);
}

// Slices of a fused projection, and a transposed state, give what their contiguous copies give.
TEST(KdaChunk, StridedInputs) {
  const KdaCase c{.lengths = {50}, .key = 32, .value = 32};
  KdaArgs x = random_kda(c);
  const auto [o, state] = chunk(x);
  KdaArgs strided = x;
  const Tensor fused = at::cat({x.q, x.k, x.v}, 2);
  strided.q = fused.narrow(2, 0, 32);
  strided.k = fused.narrow(2, 32, 32);
  strided.v = fused.narrow(2, 64, 32);
  strided.z = x.z.transpose(1, 2).contiguous().transpose(1, 2);
  strided.b = x.b.t().contiguous().t();
  strided.initial_state = x.initial_state->transpose(2, 3).contiguous().transpose(2, 3);
  const auto [o2, state2] = chunk(strided);
  EXPECT_TRUE(bit_equal(o2, o));
  EXPECT_TRUE(bit_equal(state2, state));
}

TEST(KdaChunk, PartialGradients) {
  const KdaCase c{.lengths = {40, 0, 9}};
  const KdaArgs x = random_kda(c);
  const Tensor grad_o = at::randn(x.v.sizes()), grad_state = at::randn(x.initial_state->sizes());
  const auto both = kda_grads(x, grad_o, grad_state, chunk);
  const auto only_o = kda_grads(x, grad_o, Tensor(), chunk);
  const auto only_state = kda_grads(x, Tensor(), grad_state, chunk);
  for (size_t i = 0; i < both.size(); ++i) {
    EXPECT_TRUE(close(only_o[i] + only_state[i], both[i], kFp32Grad)) << kInputNames[i];
  }
  // One input that needs a gradient is enough, and the others then get none.
  KdaArgs some = x;
  some.A_log = x.A_log.clone().requires_grad_(true);
  const auto [o, state] = chunk(some);
  o.backward(grad_o);
  EXPECT_TRUE(bit_equal(some.A_log.grad(), only_o[4]));
  EXPECT_FALSE(x.q.grad().defined());
}

TEST(KdaChunk, GraphOnlyWhereAsked) {
  KdaArgs x = random_kda({.lengths = {20}});
  EXPECT_FALSE(std::get<0>(chunk(x)).requires_grad());
  x.q.requires_grad_(true);
  EXPECT_TRUE(std::get<0>(chunk(x)).requires_grad());
  {
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(std::get<0>(chunk(x)).requires_grad());
  }
  const auto [o, state] = chunk(x);
  const auto first = torch::autograd::grad({o.sum()}, {x.q}, {}, true, /*create_graph=*/true);
  EXPECT_THROW(torch::autograd::grad({first[0].sum()}, {x.q}), c10::Error);
  Tensor step_state = x.initial_state->clone();
  KdaArgs one = slice_tokens(x, 0, 1, std::nullopt);
  EXPECT_THROW(step(one, step_state), c10::Error);
}

TEST(KdaChunk, RefusesWrongArguments) {
  const KdaArgs good = random_kda({.lengths = {4, 6}});
  const auto expect_error = [&](const char* what, auto change) {
    KdaArgs bad = good;
    change(bad);
    try {
      chunk(bad);
      ADD_FAILURE() << "accepted: " << what;
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what_without_backtrace()).find(what), std::string::npos)
          << error.what_without_backtrace();
    }
  };
  expect_error("kda_chunk: k: expected shape", [](KdaArgs& x) { x.k = x.k.narrow(2, 0, 8); });
  expect_error("kda_chunk: v: expected shape", [](KdaArgs& x) { x.v = x.v.narrow(0, 0, 5); });
  expect_error("kda_chunk: q: expected dtype", [](KdaArgs& x) { x.q = x.q.to(at::kBFloat16); });
  expect_error("kda_chunk: A_log: expected dtype", [](KdaArgs& x) { x.A_log = x.A_log.to(at::kDouble); });
  expect_error("kda_chunk: A_log: expected shape", [](KdaArgs& x) { x.A_log = at::zeros({128}); });
  expect_error("kda_chunk: cu_seqlens: expected dtype",
               [](KdaArgs& x) { x.cu_seqlens = x.cu_seqlens.to(at::kInt); });
  expect_error("the first offset 0", [](KdaArgs& x) { x.cu_seqlens = at::tensor({1, 4, 10}, at::kLong); });
  expect_error("must not decrease", [](KdaArgs& x) { x.cu_seqlens = at::tensor({0, 11, 10}, at::kLong); });
  expect_error("the last offset", [](KdaArgs& x) { x.cu_seqlens = at::tensor({0, 4, 9}, at::kLong); });
  expect_error("initial_state: expected shape",
               [](KdaArgs& x) { x.initial_state = x.initial_state->narrow(0, 0, 1); });
}

TEST(KdaChunk, MetaShapes) {
  KdaArgs x = random_kda({.lengths = {4, 6}, .key = 16, .value = 8});
  for_each_input(x, [](Tensor& t) { t = t.to(at::kMeta); });
  const auto [o, state] = chunk(x);
  EXPECT_EQ(o.sizes(), x.v.sizes());
  EXPECT_EQ(state.sizes(), x.initial_state->sizes());
  EXPECT_TRUE(o.is_meta());
}

}  // namespace
}  // namespace godwit::test
