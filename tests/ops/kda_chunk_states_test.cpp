// States at boundaries inside packed sequences are the final states of the prefixes.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tests/ops/kda_cases.h"
#include "tests/support/compare.h"

namespace godwit::test {
namespace {

using at::Tensor;
using ops::KdaArgs;

auto chunk_states(const KdaArgs& x, const Tensor& at) {
  return ops::kda_chunk_states(x.q, x.k, x.v, x.z, x.A_log, x.dt_bias, x.b, x.gate_bound, x.initial_state,
                               x.cu_seqlens, at);
}

// The states must equal, within `limit` of their norm, those of each sequence cut off at the boundary.
void expect_prefixes(const KdaArgs& x, const std::vector<int64_t>& boundaries, double limit) {
  const at::NoGradGuard no_grad;
  const auto [o, final_state, states] = chunk_states(x, at::tensor(boundaries, at::kLong));
  const auto [want_o, want_final] = chunk(x);
  EXPECT_TRUE(close_norm(o, want_o, limit));
  EXPECT_TRUE(close_norm(final_state, want_final, limit));
  const auto* cu = x.cu_seqlens.const_data_ptr<int64_t>();
  int64_t n = 0;
  for (size_t i = 0; i < boundaries.size(); ++i) {
    while (cu[n + 1] < boundaries[i]) ++n;
    KdaArgs prefix = x;
    for (Tensor* t : {&prefix.q, &prefix.k, &prefix.v, &prefix.z, &prefix.b})
      *t = t->slice(0, cu[n], boundaries[i]);
    if (x.initial_state.has_value()) prefix.initial_state = x.initial_state->narrow(0, n, 1);
    prefix.cu_seqlens = at::tensor({int64_t{0}, boundaries[i] - cu[n]}, at::kLong);
    EXPECT_TRUE(close_norm(states[static_cast<int64_t>(i)], std::get<1>(chunk(prefix))[0], limit))
        << boundaries[i];
  }
}

const KdaCase kPacked{{0, 65, 0, 16, 40, 1}, 2, 32, 48, -5.0, true};

TEST(KdaChunkStates, ArePrefixes) {
  // Pieces of other lengths sum in another order.
  for (const bool initial : {false, true}) {
    KdaCase c = kPacked;
    c.initial_state = initial;
    expect_prefixes(random_kda(c), {1, 16, 33, 64, 65, 81, 97, 121, 122}, 1e-5);
    expect_prefixes(random_kda(c), {}, 1e-5);
  }
}

TEST(KdaChunkStates, Bf16States) {
  const at::NoGradGuard no_grad;
  KdaArgs x = random_kda(kPacked);
  x.initial_state = x.initial_state->to(at::kBFloat16);
  const auto [o, final_state, states] = chunk_states(x, at::tensor({16, 65}, at::kLong));
  EXPECT_EQ(final_state.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(bit_equal(states[1], final_state[1]));
  KdaArgs full = x;
  full.initial_state = x.initial_state->to(at::kFloat);
  const auto [o_chunk, state_chunk] = chunk(x);
  const auto [o_full, state_full] = chunk(full);
  EXPECT_TRUE(bit_equal(o_chunk, o_full));
  EXPECT_TRUE(bit_equal(state_chunk, state_full.to(at::kBFloat16)));
}

TEST(KdaChunkStates, RefusesBadBoundaries) {
  const at::NoGradGuard no_grad;
  const KdaArgs x = random_kda(kPacked);
  for (const std::vector<int64_t>& at : {std::vector<int64_t>{0}, {5, 5}, {123}})
    EXPECT_THROW(chunk_states(x, at::tensor(at, at::kLong)), c10::Error);
}

TEST(KdaChunkStates, OnAGpu) {
  if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no GPU";
  for (const KdaCase& c : {KdaCase{{0, 65, 0, 16, 40, 1}, 2, 128, 128, -5.0, true},
                           KdaCase{{2100, 30}, 1, 128, 128, -5.0, true}}) {
    KdaArgs x = random_kda(c);
    for (Tensor* t : {&x.q, &x.k, &x.v, &x.z, &x.b}) *t = t->to(at::kCUDA, at::kBFloat16);
    for (Tensor* t : {&x.A_log, &x.dt_bias}) *t = t->to(at::kCUDA);
    x.initial_state = x.initial_state->to(at::kCUDA);
    const bool cut = c.lengths[0] == 2100;
    // Bit for bit where nothing is cut into segments; cut ones are rounded otherwise.
    if (!cut) expect_prefixes(x, {16, 48, 64, 65, 81, 97, 121, 122}, 0);
    expect_prefixes(
        x, cut ? std::vector<int64_t>{16, 1024, 2000, 2100, 2116} : std::vector<int64_t>{17, 33, 65}, 8e-3);
  }
}

}  // namespace
}  // namespace godwit::test
