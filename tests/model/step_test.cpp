// Rows that take the step forms: fused or op by op, together or one by one, taken back and replayed: the same
// bits.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "godwit/model/forward.h"
#include "godwit/model/weight_format.h"
#include "tests/model/tiny.h"
#include "tests/support/compare.h"

namespace godwit {
namespace {

using at::Tensor;

struct Model {
  ModelConfig config;
  ModelWeights weights;
};

Model tiny_model(const ModelConfig& config, const char* format = "") {
  Model m{.config = config, .weights = init_weights(config, 7, at::kCPU, at::kFloat)};
  pack_weights(m.config, m.weights, weight_format_of(format));
  return m;
}

Tensor ids_of(const Model& m, int64_t from, int64_t count) {
  return at::arange(from, from + count, at::kLong).mul(13).remainder(m.config.vocab_size);
}

// Three sequences that have seen 70, 5 and 0 tokens.
ModelState some_state(const Model& m) {
  ModelState state(m.config, {.sequences = 3}, at::kCPU, at::kFloat);
  forward_hidden(m.config, m.weights,
                 {.ids = ids_of(m, 3, 75), .cu_seqlens = make_cu_seqlens({70, 5}), .sequences = {0, 1}},
                 &state);
  return state;
}

void expect_same(ModelState& a, ModelState& b) {
  for (size_t i = 0; i < a.layers().size(); ++i) {
    const auto x = a.layers()[i].kda.tensors(), y = b.layers()[i].kda.tensors();
    for (size_t t = 0; t < x.size(); ++t) {
      if (x[t]->defined()) EXPECT_TRUE(test::bit_equal(*x[t], *y[t])) << "layer " << i << " tensor " << t;
    }
  }
}

class StepVariants : public ::testing::TestWithParam<test::NamedConfig> {};

// A callback for the router keeps the forward from the fused form.
TEST_P(StepVariants, FusedEqualsOpByOp) {
  const at::NoGradGuard no_grad;
  for (const char* format : {"", "int8"}) {
    const Model m = tiny_model(GetParam().config, format);
    ModelState fused = some_state(m), plain = some_state(m);
    ForwardOptions watch;
    watch.on_router = [](const RouterTrace&) {};
    for (int64_t step = 0; step < 3; ++step) {
      const PackedBatch batch{.ids = ids_of(m, 40 + step, 3), .cu_seqlens = make_cu_seqlens({1, 1, 1})};
      const Tensor a = forward_hidden(m.config, m.weights, batch, &fused);
      const Tensor b = forward_hidden(m.config, m.weights, batch, &plain, watch);
      EXPECT_TRUE(test::bit_equal(a, b)) << format << " step " << step;
    }
    expect_same(fused, plain);
  }
}

// Several tokens of a sequence as step rows, beside one of another and beside a piece of a prompt.
TEST_P(StepVariants, RunsEqualStepsOneByOne) {
  const at::NoGradGuard no_grad;
  const Model m = tiny_model(GetParam().config);
  for (const bool with_piece : {false, true}) {
    ModelState together = some_state(m), apart = some_state(m);
    std::vector<int64_t> lengths = {4, 3}, sequences = {0, 1};
    if (with_piece) lengths.push_back(9), sequences.push_back(2);
    const int64_t rows = with_piece ? 16 : 7;
    const Tensor ids = ids_of(m, 20, rows);
    const Tensor a = forward_hidden(
        m.config, m.weights,
        {.ids = ids, .cu_seqlens = make_cu_seqlens(lengths), .sequences = sequences, .step_sequences = 2},
        &together);
    for (int64_t t = 0; t < 7; ++t) {
      const Tensor b = forward_hidden(
          m.config, m.weights,
          {.ids = ids.narrow(0, t, 1), .cu_seqlens = make_cu_seqlens({1}), .sequences = {t < 4 ? 0 : 1}},
          &apart);
      EXPECT_TRUE(test::bit_equal(a.narrow(0, t, 1), b)) << with_piece << " row " << t;
    }
    EXPECT_EQ(together.length(0), 74);
    EXPECT_EQ(together.length(1), 8);
  }
}

// Five tokens fed, three of them taken back: as if two had been fed.
TEST_P(StepVariants, TakenBackAndReplayed) {
  const at::NoGradGuard no_grad;
  const Model m = tiny_model(GetParam().config);
  for (const bool piece : {false, true}) {  // a piece beside them: op by op
    ModelState taken_back = some_state(m), straight = some_state(m);
    const Tensor ids = ids_of(m, 30, 6);
    const auto before = taken_back.copy_kda(0);
    std::vector<int64_t> lengths = {5, 1}, sequences = {0, 1};
    Tensor all = ids;
    if (piece) {
      lengths.push_back(3), sequences.push_back(2);
      all = at::cat({ids, ids_of(m, 50, 3)});
    }
    forward_hidden(m.config, m.weights,
                   {.ids = all,
                    .cu_seqlens = make_cu_seqlens(lengths),
                    .sequences = sequences,
                    .step_sequences = 2,
                    .record = true},
                   &taken_back);
    taken_back.rewind(0, before, 5);
    replay_steps(m.config, m.weights, taken_back, 0, 0, 2);
    taken_back.advance(0, 2);
    for (int64_t t = 0; t < 2; ++t) {
      forward_hidden(m.config, m.weights,
                     {.ids = ids.narrow(0, t, 1), .cu_seqlens = make_cu_seqlens({1}), .sequences = {0}},
                     &straight);
    }
    ASSERT_EQ(taken_back.length(0), straight.length(0));
    const PackedBatch next{.ids = ids_of(m, 77, 1), .cu_seqlens = make_cu_seqlens({1}), .sequences = {0}};
    EXPECT_TRUE(test::bit_equal(forward_hidden(m.config, m.weights, next, &taken_back),
                                forward_hidden(m.config, m.weights, next, &straight)))
        << piece;
  }
}

INSTANTIATE_TEST_SUITE_P(Tiny, StepVariants, ::testing::ValuesIn(test::tiny_variants()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace godwit
