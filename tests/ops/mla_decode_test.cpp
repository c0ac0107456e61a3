// mla_decode against its fp64 oracle, and what an engine with pages needs: bits that depend on the sequence
// alone.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "godwit/ops/ops.h"
#include "godwit/ops/ref/mla_decode_ref.h"
#include "tests/support/compare.h"

namespace godwit {
namespace {

using at::Tensor;

constexpr int64_t kPageRows = 16;

struct Case {
  std::vector<int64_t> lengths;
  int64_t heads = 3, rank = 64, positional = 16;
  int64_t window = 0;
  at::ScalarType rows = at::kFloat;
};

// Pages in an order of their own; whatever no sequence owns is NaN.
struct Paged {
  Tensor q, pages, table, lengths;
  int64_t rank = 0, window = 0;
  double scale = 0;

  [[nodiscard]] Tensor run() const { return ops::mla_decode(q, pages, table, lengths, rank, scale, window); }
  // Sequence n alone, its pages in another pool.
  [[nodiscard]] Paged alone(int64_t n) const {
    Paged one = *this;
    one.q = q.narrow(0, n, 1);
    one.lengths = lengths.narrow(0, n, 1);
    const int64_t used = (lengths[n].item<int64_t>() + kPageRows - 1) / kPageRows;
    one.pages = pages.index_select(0, table[n].narrow(0, 0, used)).flip(0).contiguous();
    one.table = at::arange(used - 1, -1, -1, at::kInt).unsqueeze(0);
    return one;
  }
};

Paged make(const Case& c) {
  at::manual_seed(7);
  const auto n = static_cast<int64_t>(c.lengths.size());
  const int64_t width = c.rank + c.positional;
  const int64_t longest = *std::max_element(c.lengths.begin(), c.lengths.end());
  const int64_t columns = (longest + kPageRows - 1) / kPageRows + 1;
  Paged x;
  x.rank = c.rank;
  x.window = c.window;
  x.scale = 1.5 / std::sqrt(static_cast<double>(width));
  x.q = at::randn({n, c.heads, width});
  x.pages = at::full({n * columns + 2, kPageRows, width}, std::numeric_limits<float>::quiet_NaN()).to(c.rows);
  x.table = at::randperm(n * columns + 2, at::kInt).narrow(0, 0, n * columns).view({n, columns}).contiguous();
  x.lengths = at::tensor(at::ArrayRef<int64_t>(c.lengths), at::kLong);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t first = c.window > 0 ? std::max<int64_t>(0, c.lengths[i] - c.window) : 0;
    for (int64_t r = first; r < c.lengths[i]; ++r) {
      x.pages[x.table[i][r / kPageRows].item<int64_t>()][r % kPageRows].copy_(at::randn({width}));
    }
  }
  return x;
}

Tensor oracle(const Paged& x) {
  return ops::ref::mla_decode({x.q.to(at::kDouble), x.pages, x.table, x.lengths, x.rank, x.scale, x.window});
}

const std::vector<int64_t> kLengths = {1, kPageRows - 1, kPageRows, kPageRows + 1, 1000, 2, 257, 33};

TEST(MlaDecode, MatchesOracle) {
  for (const int64_t heads : {1, 2, 3, 4, 5, 8, 17}) {
    for (const auto& [rank, positional] : {std::pair<int64_t, int64_t>{64, 16}, {512, 64}, {33, 6}, {7, 0}}) {
      if (rank == 512 && heads > 4) continue;
      const Paged x = make({.lengths = kLengths, .heads = heads, .rank = rank, .positional = positional});
      EXPECT_TRUE(test::close(x.run(), oracle(x), test::kFp32)) << "heads " << heads << ", rank " << rank;
    }
  }
}

// Pages, page tails and rows before the window are NaN (make): one that leaks shows.
TEST(MlaDecode, Window) {
  for (const int64_t window : {1, 15, 16, 17, 300, 5000}) {
    const Paged x = make({.lengths = kLengths, .window = window});
    EXPECT_TRUE(test::close(x.run(), oracle(x), test::kFp32)) << "window " << window;
  }
}

TEST(MlaDecode, RowsOfBf16) {
  for (const int64_t rank : {64, 33}) {  // the products are exact in fp32, so only sums are rounded
    const Paged x = make({.lengths = kLengths, .rank = rank, .rows = at::kBFloat16});
    EXPECT_TRUE(test::close(x.run(), oracle(x), test::kFp32));
  }
}

// Rows of e4m3 are the numbers they stand for.
TEST(MlaDecode, RowsOfFp8) {
  for (const int64_t window : {0, 40}) {
    Paged x = make({.lengths = {1, 15, 16, 17, 100}, .window = window}), wide = x;
    x.pages = x.pages.to(at::kFloat8_e4m3fn);
    wide.pages = x.pages.to(at::kFloat);
    EXPECT_TRUE(at::equal(x.run(), wide.run())) << window;
    EXPECT_TRUE(test::close(x.run(), oracle(x), test::kFp32));
  }
}

TEST(MlaDecode, OtherTypes) {
  Paged x = make({.lengths = kLengths});
  const Tensor expected = oracle(x), q = x.q;
  x.q = q.to(at::kBFloat16);
  EXPECT_EQ(x.run().scalar_type(), at::kBFloat16);
  EXPECT_TRUE(test::close(x.run(), expected, test::kBf16));
  x.q = q.to(at::kDouble);
  EXPECT_TRUE(test::close(x.run(), expected, test::kFp64));
  x.q = q;
  x.pages = x.pages.to(at::kHalf);
  EXPECT_TRUE(test::close(x.run(), oracle(x), test::kFp32));
}

TEST(MlaDecode, AloneEqualsInBatchBitForBit) {
  for (const auto rows : {at::kFloat, at::kBFloat16}) {
    for (const int64_t window : {0, 40}) {
      const Paged x = make(
          {.lengths = {1, 1000, 300, 15, 16, 17, 700, 5000}, .heads = 5, .window = window, .rows = rows});
      const Tensor whole = x.run();
      for (int64_t n = 0; n < x.q.size(0); ++n) {
        EXPECT_TRUE(test::bit_equal(x.alone(n).run(), whole.narrow(0, n, 1))) << "sequence " << n;
      }
    }
  }
}

TEST(MlaDecode, ThreadsDoNotMatter) {
  const Paged x = make({.lengths = {3000, 20, 400}, .heads = 9, .rank = 128});
  const Paged one = x.alone(0);
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const Tensor all = x.run(), single = one.run();
  for (const int threads : {2, 3, 7}) {
    at::set_num_threads(threads);
    EXPECT_TRUE(test::bit_equal(x.run(), all)) << threads;
    EXPECT_TRUE(test::bit_equal(one.run(), single)) << threads;
  }
  at::set_num_threads(before);
}

// Scores far apart: weights that vanish, and a largest score in the last block.
TEST(MlaDecode, Limits) {
  Paged x = make({.lengths = {600, 600}});
  x.scale = 40;
  EXPECT_TRUE(test::close(x.run(), oracle(x), test::kFp32Chain));  // scores of about 1e3 carry errors of 1e-4
  x.q.zero_();
  EXPECT_TRUE(test::close(x.run(), oracle(x), test::kFp32));
}

TEST(MlaDecode, EmptyAndMeta) {
  const Paged x = make({.lengths = {5}});
  const Tensor none = ops::mla_decode(x.q.narrow(0, 0, 0), x.pages, x.table.narrow(0, 0, 0),
                                      x.lengths.narrow(0, 0, 0), 64, 1, 0);
  EXPECT_EQ(none.sizes(), at::IntArrayRef({0, 3, 64}));
  const Tensor shape =
      ops::mla_decode(x.q.to(at::kMeta), x.pages.to(at::kMeta), x.table, x.lengths, 64, 1, 0);
  EXPECT_TRUE(shape.is_meta());
  EXPECT_EQ(shape.sizes(), at::IntArrayRef({1, 3, 64}));
}

TEST(MlaDecode, RefusesBadArguments) {
  const Paged good = make({.lengths = {5, 20}});
  const auto refused = [&](auto&& change) {
    Paged x = good;
    change(x);
    EXPECT_THROW((void)x.run(), c10::Error);
  };
  refused([](Paged& x) { x.lengths = at::tensor({0, 20}, at::kLong); });
  refused([](Paged& x) { x.lengths = at::tensor({5, 2000}, at::kLong); });
  refused([](Paged& x) { x.lengths = at::tensor({5}, at::kLong); });
  refused([](Paged& x) { x.table = x.table + 100; });
  refused([](Paged& x) { x.table = x.table.to(at::kLong); });
  refused([](Paged& x) { x.rank = 81; });
  refused([](Paged& x) { x.window = -1; });
  refused([](Paged& x) { x.pages = x.pages.narrow(2, 0, 40); });
  refused([](Paged& x) { x.q = x.q.clone().requires_grad_(true); });
}

}  // namespace
}  // namespace godwit
