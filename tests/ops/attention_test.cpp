// attention against its fp64 oracle: lengths that bite, cached keys, windows, packing; widths that are
// multiples of 16 take our kernels on the CPU, others ATen's. Of ours: an output row depends only on what its
// query sees, bit for bit, and gradients have a fixed order.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

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
  int64_t key_width = 48;
  int64_t value_width = 32;
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
  for (const int64_t t : {0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257}) {
    check_case({.queries = {t}, .keys = {t}});
    check_case({.queries = {t}, .keys = {t}, .key_width = 24, .value_width = 16});
    check_case({.queries = {t}, .keys = {t}, .key_width = 16, .value_width = 48});
  }
  check_case({.queries = {400, 30}, .keys = {400, 30}, .key_width = 192, .value_width = 128});
  check_case({.queries = {5, 0, 17, 1}, .keys = {5, 0, 17, 1}});
  check_case({.queries = {33}, .keys = {33}, .key_width = 16, .value_width = 16});
  check_case({.queries = {33}, .keys = {33}, .key_width = 8, .value_width = 16});
}

TEST(Attention, QueriesAfterCachedKeys) {
  check_case({.queries = {1, 1, 1}, .keys = {1, 65, 300}});
  for (const auto& [key, value] : {std::pair(48, 32), {24, 16}}) {
    check_case({.queries = {17, 3, 0, 300}, .keys = {64, 3, 9, 700}, .key_width = key, .value_width = value});
  }
}

TEST(Attention, Window) {
  for (const int64_t window : {1, 16, 256, 600}) {
    check_case({.queries = {600, 7, 0}, .keys = {600, 7, 4}, .window = window});
    check_case({.queries = {1, 290}, .keys = {300, 310}, .window = window});
    check_case(
        {.queries = {1, 290}, .keys = {300, 310}, .window = window, .key_width = 24, .value_width = 16});
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

// What the tests of bits use: one sequence, or several.
struct Random {
  Tensor q, k, v, grad_o;
  double scale;
  Random(int64_t queries, int64_t keys, int64_t heads, int64_t key_width, int64_t value_width)
      : q(at::randn({queries, heads, key_width})),
        k(at::randn({keys, heads, key_width})),
        v(at::randn({keys, heads, value_width})),
        grad_o(at::randn({queries, heads, value_width})),
        scale(1.0 / std::sqrt(static_cast<double>(key_width))) {}

  [[nodiscard]] Tensor run(const Tensor& cu_q, const Tensor& cu_k, int64_t window) const {
    return ops::attention(q, k, v, cu_q, cu_k, scale, window);
  }
  [[nodiscard]] std::vector<Tensor> grads(const Tensor& cu_q, const Tensor& cu_k, int64_t window) const {
    return test::gradients(
        [&](const auto& x) { return ops::attention(x[0], x[1], x[2], cu_q, cu_k, scale, window); }, {q, k, v},
        grad_o);
  }
  // Queries [query, query + n) after keys [key, key + keys).
  [[nodiscard]] Random slice(int64_t query, int64_t n, int64_t key, int64_t keys) const {
    Random part = *this;
    part.q = q.narrow(0, query, n);
    part.k = k.narrow(0, key, keys);
    part.v = v.narrow(0, key, keys);
    part.grad_o = grad_o.narrow(0, query, n);
    return part;
  }
};

TEST(Attention, PrefillInPiecesEqualsAtOnceBitForBit) {
  at::manual_seed(4);
  for (const auto& [key_width, value_width] : {std::pair(192, 128), {48, 16}}) {
    const Random x(700, 700, 2, key_width, value_width);
    for (const int64_t window : {0, 1, 100, 300}) {
      const Tensor whole = x.run(offsets({700}), offsets({700}), window);
      for (const int64_t piece : {1, 7, 64, 128, 131, 500}) {
        for (int64_t from = piece == 1 ? 640 : 0; from < 700; from += piece) {
          const int64_t n = std::min<int64_t>(piece, 700 - from);
          const Tensor part = x.slice(from, n, 0, from + n).run(offsets({n}), offsets({from + n}), window);
          EXPECT_TRUE(test::bit_equal(part, whole.narrow(0, from, n)))
              << "window " << window << ", piece " << piece;
        }
      }
    }
  }
}

TEST(Attention, AloneEqualsInBatchBitForBit) {
  at::manual_seed(5);
  const std::vector<int64_t> queries = {3, 200, 1, 0, 129}, keys = {3, 450, 257, 7, 129};
  const Random x(333, 846, 2, 64, 32);
  for (const int64_t window : {0, 90}) {
    const Tensor o = x.run(offsets(queries), offsets(keys), window);
    const auto grads = x.grads(offsets(queries), offsets(keys), window);
    for (int64_t n = 0, q = 0, k = 0; n < 5; q += queries[n], k += keys[n], ++n) {
      const Random one = x.slice(q, queries[n], k, keys[n]);
      const Tensor cu_q = offsets({queries[n]}), cu_k = offsets({keys[n]});
      EXPECT_TRUE(test::bit_equal(one.run(cu_q, cu_k, window), o.narrow(0, q, queries[n]))) << n;
      const auto alone = one.grads(cu_q, cu_k, window);
      EXPECT_TRUE(test::bit_equal(alone[0], grads[0].narrow(0, q, queries[n]))) << n;
      EXPECT_TRUE(test::bit_equal(alone[1], grads[1].narrow(0, k, keys[n]))) << n;
      EXPECT_TRUE(test::bit_equal(alone[2], grads[2].narrow(0, k, keys[n]))) << n;
    }
  }
}

// With one head and 4,200 keys the gradient of a query is summed in two groups of keys.
TEST(Attention, LongSequenceAndThreads) {
  at::manual_seed(6);
  const Random x(4200, 4200, 1, 16, 16);
  const Tensor cu = offsets({4200});
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const Tensor o = x.run(cu, cu, 0);
  const auto grads = x.grads(cu, cu, 0), banded = x.grads(cu, cu, 1500);
  for (const int threads : {2, 5}) {
    at::set_num_threads(threads);
    EXPECT_TRUE(test::bit_equal(x.run(cu, cu, 0), o));
    const auto again = x.grads(cu, cu, 0), banded_again = x.grads(cu, cu, 1500);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(test::bit_equal(again[i], grads[i])) << threads << " threads, input " << i;
      EXPECT_TRUE(test::bit_equal(banded_again[i], banded[i])) << threads << " threads, input " << i;
    }
  }
  at::set_num_threads(before);
  const auto heads_first = [](const Tensor& t) { return t.to(at::kDouble).transpose(0, 1).unsqueeze(0); };
  const test::TensorFn plain = [&](const auto& in) {
    return at::scaled_dot_product_attention(heads_first(in[0]), heads_first(in[1]), heads_first(in[2]), {},
                                            0.0,
                                            /*is_causal=*/true, x.scale)
        .squeeze(0)
        .transpose(0, 1);
  };
  const std::vector<Tensor> inputs = test::to_double({x.q, x.k, x.v});
  EXPECT_TRUE(test::close(o, plain(inputs), test::kFp32));
  const auto expected = test::gradients(plain, inputs, x.grad_o);
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(test::close(grads[i], expected[i], test::kFp32Grad)) << i;
}

// What a query may not see is not even multiplied by zero.
TEST(Attention, UnseenNanDoesNotLeak) {
  at::manual_seed(7);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Random clean(300, 300, 2, 48, 32);
  const Tensor cu = offsets({300});
  const Tensor o = clean.run(cu, cu, 0), banded = clean.run(cu, cu, 40);
  for (const int64_t at : {1, 5, 12, 100, 128, 200, 299}) {
    Random x = clean;
    x.k = clean.k.clone();
    x.v = clean.v.clone();
    x.k[at].fill_(nan);
    x.v[at].fill_(nan);
    EXPECT_TRUE(test::bit_equal(x.run(cu, cu, 0).narrow(0, 0, at), o.narrow(0, 0, at))) << at;
    const Tensor y = x.run(cu, cu, 40);
    EXPECT_TRUE(test::bit_equal(y.narrow(0, 0, at), banded.narrow(0, 0, at))) << at;
    const int64_t after = std::min<int64_t>(300, at + 40);
    EXPECT_TRUE(test::bit_equal(y.slice(0, after), banded.slice(0, after))) << at;
    EXPECT_TRUE(at::isnan(y.slice(0, at, after)).all().item<bool>()) << at;
  }
  Random late(20, 320, 2, 48, 32);  // all queries' windows begin behind the NaN
  late.k.narrow(0, 0, 271).fill_(nan);
  late.v.narrow(0, 0, 271).fill_(nan);
  const auto grads = late.grads(offsets({20}), offsets({320}), 30);
  for (const Tensor& grad : grads) EXPECT_TRUE(at::isfinite(grad).all().item<bool>());
  for (const size_t i : {1, 2}) EXPECT_TRUE(grads[i].narrow(0, 0, 271).eq(0).all().item<bool>());
}

// Tokens and heads at any strides.
TEST(Attention, Strides) {
  at::manual_seed(8);
  const Random x(130, 130, 3, 32, 16);
  Random y = x;
  y.q = at::cat({x.q, x.q}, 2).narrow(2, 32, 32);
  y.k = x.k.transpose(0, 1).contiguous().transpose(0, 1);
  y.v = x.v.transpose(1, 2).contiguous().transpose(1, 2);
  const Tensor cu = offsets({130});
  EXPECT_TRUE(test::bit_equal(x.run(cu, cu, 0), y.run(cu, cu, 0)));
  const auto expected = x.grads(cu, cu, 0), got = y.grads(cu, cu, 0);
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(test::bit_equal(got[i], expected[i]));
}

TEST(Attention, LargeScores) {
  at::manual_seed(9);
  Random x(200, 200, 2, 32, 16);
  x.q = x.q * 30;
  const Tensor cu = offsets({200});
  const Tensor expected =
      ops::ref::attention(x.q.to(at::kDouble), x.k.to(at::kDouble), x.v.to(at::kDouble), cu, cu, x.scale, 0);
  EXPECT_TRUE(
      test::close(x.run(cu, cu, 0), expected, test::kFp32Chain));  // scores of 1e2 carry errors of 1e-5
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
  const Tensor wide = at::randn({4, 2, 16});
  EXPECT_THROW(ops::attention(wide, wide, wide, offsets({1, 3}), offsets({3, 1}), 1, 0), c10::Error);
}

}  // namespace
}  // namespace godwit
