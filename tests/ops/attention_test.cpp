// attention against its fp64 oracle: lengths that bite, cached keys, windows, packing.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "godwit/ops/ops.h"
#include "godwit/ops/ref/attention_ref.h"
#include "tests/support/gradients.h"

namespace godwit {
namespace {

using at::Tensor;

Tensor offsets(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> cu = {0};
  for (const int64_t n : lengths) cu.push_back(cu.back() + n);
  return at::tensor(cu, at::kLong);
}

struct Case {
  std::vector<int64_t> queries;
  std::vector<int64_t> keys;
  int64_t window = 0;
  int64_t key_width = 24;
  int64_t value_width = 16;
};

constexpr int64_t kHeads = 3;

void check_case(const Case& c) {
  at::manual_seed(1);
  const Tensor cu_q = offsets(c.queries), cu_k = offsets(c.keys);
  const int64_t tq = cu_q[-1].item<int64_t>(), tk = cu_k[-1].item<int64_t>();
  const std::vector<Tensor> inputs = {at::randn({tq, kHeads, c.key_width}),
                                      at::randn({tk, kHeads, c.key_width}),
                                      at::randn({tk, kHeads, c.value_width})};
  const Tensor projection = at::randn({tq, kHeads, c.value_width});
  const double scale = 1.0 / std::sqrt(static_cast<double>(c.key_width));
  const test::TensorFn op = [&](const auto& x) {
    return ops::attention(x[0], x[1], x[2], cu_q, cu_k, scale, c.window);
  };
  const test::TensorFn oracle = [&](const auto& x) {
    return ops::ref::attention(x[0], x[1], x[2], cu_q, cu_k, scale, c.window);
  };
  EXPECT_TRUE(test::close(op(inputs), oracle(test::to_double(inputs)), test::kFp32));
  EXPECT_TRUE(test::close(op(test::to_double(inputs)), oracle(test::to_double(inputs)), test::kFp64));
  if (tq == 0) return;
  const auto got = test::gradients(op, inputs, projection);
  const auto expected = test::gradients(oracle, test::to_double(inputs), projection);
  for (size_t i = 0; i < got.size(); ++i)
    EXPECT_TRUE(test::close(got[i], expected[i], test::kFp32Grad)) << "input " << i;
}

TEST(Attention, WholeSequences) {
  for (const int64_t t : {0, 1, 15, 16, 17, 63, 64, 65, 257}) check_case({.queries = {t}, .keys = {t}});
  check_case({.queries = {5, 0, 17, 1}, .keys = {5, 0, 17, 1}});
  check_case({.queries = {33}, .keys = {33}, .key_width = 16, .value_width = 16});
  check_case({.queries = {33}, .keys = {33}, .key_width = 8, .value_width = 16});
}

TEST(Attention, QueriesAfterCachedKeys) {
  check_case({.queries = {1, 1, 1}, .keys = {1, 65, 300}});
  check_case({.queries = {17, 3, 0, 300}, .keys = {64, 3, 9, 700}});
}

TEST(Attention, Window) {
  for (const int64_t window : {1, 16, 256, 600}) {
    check_case({.queries = {600, 7, 0}, .keys = {600, 7, 4}, .window = window});
    check_case({.queries = {1, 290}, .keys = {300, 310}, .window = window});
  }
}

TEST(Attention, PackedEqualsSeparate) {
  at::manual_seed(2);
  const Tensor q = at::randn({40, 2, 8}), k = at::randn({40, 2, 8}), v = at::randn({40, 2, 8});
  const Tensor packed = ops::attention(q, k, v, offsets({13, 27}), offsets({13, 27}), 0.3, 0);
  const auto part = [&](int64_t from, int64_t n) {
    return ops::attention(q.narrow(0, from, n), k.narrow(0, from, n), v.narrow(0, from, n), offsets({n}),
                          offsets({n}), 0.3, 0);
  };
  EXPECT_TRUE(test::bit_equal(packed, at::cat({part(0, 13), part(13, 27)})));
}

TEST(Attention, GradientMatchesFiniteDifference) {
  at::manual_seed(3);
  const auto options = at::TensorOptions().dtype(at::kDouble);
  const std::vector<Tensor> inputs = {at::randn({7, 2, 4}, options), at::randn({12, 2, 4}, options),
                                      at::randn({12, 2, 3}, options)};
  const Tensor projection = at::randn({7, 2, 3}, options);
  EXPECT_TRUE(test::matches_finite_difference(
      [](const auto& x) {
        return ops::ref::attention(x[0], x[1], x[2], offsets({3, 4}), offsets({5, 7}), 0.5, 3);
      },
      inputs, projection));
}

TEST(Attention, RefusesBadArguments) {
  const Tensor q = at::randn({4, 2, 8});
  EXPECT_THROW(ops::attention(q, q, q, offsets({3}), offsets({4}), 1, 0), c10::Error);
  EXPECT_THROW(ops::attention(q, q.narrow(0, 0, 3), q.narrow(0, 0, 3), offsets({4}), offsets({3}), 1, 0),
               c10::Error);
  EXPECT_THROW(ops::attention(q, q.narrow(2, 0, 4), q, offsets({4}), offsets({4}), 1, 0), c10::Error);
}

}  // namespace
}  // namespace godwit
