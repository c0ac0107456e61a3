// mla_decode of long contexts on a GPU against the fp64 composition on the CPU. Skipped where there is no
// GPU.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <limits>

#include "godwit/ops/ops.h"
#include "godwit/ops/ref/mla_decode_ref.h"
#include "tests/support/compare.h"

namespace godwit::test {
namespace {

using at::Tensor;

struct Paged {
  Tensor q, pages, table, lengths;
};

// Pages in an order of their own; rows that no sequence owns are NaN.
Paged draw(const std::vector<int64_t>& lengths, int64_t heads, int64_t width, int64_t page_rows) {
  const auto n = static_cast<int64_t>(lengths.size());
  const int64_t columns = (*std::max_element(lengths.begin(), lengths.end()) + page_rows - 1) / page_rows + 1;
  Paged x{.q = at::randn({n, heads, width}).to(at::kBFloat16),
          .pages = at::full({n * columns, page_rows, width}, std::numeric_limits<float>::quiet_NaN())
                       .to(at::kBFloat16),
          .table = at::randperm(n * columns, at::kInt).view({n, columns}).contiguous(),
          .lengths = at::tensor(at::ArrayRef<int64_t>(lengths), at::kLong)};
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t row = 0; row < lengths[i]; row += page_rows) {
      const int64_t rows = std::min(page_rows, lengths[i] - row);
      x.pages[x.table[i][row / page_rows].item<int64_t>()].narrow(0, 0, rows).copy_(at::randn({rows, width}));
    }
  }
  return x;
}

TEST(MlaDecodeLongCuda, MatchesReference) {
  if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no GPU";
  at::manual_seed(1);
  constexpr int64_t kWidth = 576, kRank = 512;
  for (const int64_t heads : {12, 96}) {
    for (const int64_t window : {0, 70, 16400}) {
      const Paged x = draw({1, 64, 65, 16500, 257}, heads, kWidth, /*page_rows=*/64);
      const double scale = 1.5 / std::sqrt(static_cast<double>(kWidth));
      const Tensor want = ops::ref::mla_decode(
          {x.q.to(at::kDouble), x.pages.to(at::kDouble), x.table, x.lengths, kRank, scale, window});
      const auto run = [&] {
        return ops::mla_decode(x.q.to(at::kCUDA), x.pages.to(at::kCUDA), x.table, x.lengths, kRank, scale,
                               window);
      };
      const Tensor got = run();
      EXPECT_TRUE(close_norm(got, want, kBf16Chain)) << heads << " heads, window " << window;
      EXPECT_TRUE(bit_equal(run(), got));
    }
  }
}

}  // namespace
}  // namespace godwit::test
