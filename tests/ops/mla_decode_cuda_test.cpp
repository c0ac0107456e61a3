// mla_decode on a GPU against the fp64 composition on the CPU. Skipped where there is no GPU.
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

Tensor oracle(const Paged& x, int64_t rank, double scale, int64_t window) {
  return ops::ref::mla_decode(
      {x.q.to(at::kDouble), x.pages.to(at::kDouble), x.table, x.lengths, rank, scale, window});
}

TEST(MlaDecodeCuda, MatchesReference) {
  if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no GPU";
  at::manual_seed(1);
  for (const int64_t rank : {256, 512}) {
    for (const int64_t heads : {12, 96}) {
      for (const int64_t window : {0, 70, 16400}) {
        const Paged x = draw({1, 64, 65, 16500, 257}, heads, rank + 64, /*page_rows=*/64);
        const double scale = 1.5 / std::sqrt(static_cast<double>(rank + 64));
        const Tensor want = oracle(x, rank, scale, window), q = x.q.to(at::kCUDA),
                     pages = x.pages.to(at::kCUDA);
        const auto run = [&](at::Device lengths) {
          return ops::mla_decode(q, pages, x.table.to(lengths), x.lengths.to(lengths), rank, scale, window);
        };
        for (const at::Device lengths : {at::kCPU, at::kCUDA}) {
          const Tensor got = run(lengths);
          EXPECT_TRUE(close_norm(got, want, kBf16Chain))
              << rank << ", " << heads << " heads, window " << window << ", lengths on " << lengths;
          EXPECT_TRUE(bit_equal(run(lengths), got));
        }
      }
    }
  }
}

TEST(MlaDecodeCuda, RowsOfFp8) {
  if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no GPU";
  at::manual_seed(2);
  for (const int64_t rank : {256, 512}) {
    Paged x = draw({300, 1, 129}, 20, rank + 64, /*page_rows=*/64);
    const Tensor bytes = x.pages.to(at::kFloat).to(at::kFloat8_e4m3fn);
    x.pages = bytes.to(at::kFloat).to(at::kBFloat16);
    const Tensor got =
        ops::mla_decode(x.q.to(at::kCUDA), bytes.to(at::kCUDA), x.table, x.lengths, rank, 0.06, 0);
    EXPECT_TRUE(close_norm(got, oracle(x, rank, 0.06, 0), kBf16Chain)) << rank;
  }
}

// With lengths on the device the number of sequences decides how each is cut; under
// torch.use_deterministic_algorithms, with lengths on the host, nothing but a sequence's own rows does.
TEST(MlaDecodeCuda, AloneEqualsInBatchBitForBit) {
  if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no GPU";
  at::manual_seed(3);
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  for (const int64_t heads : {12, 96}) {
    const Paged x = draw({5000, 64, 17000}, heads, 576, /*page_rows=*/64);
    const Tensor q = x.q.to(at::kCUDA), pages = x.pages.to(at::kCUDA);
    const Tensor whole = ops::mla_decode(q, pages, x.table, x.lengths, 512, 0.06, 0);
    for (int64_t n = 0; n < 3; ++n)
      EXPECT_TRUE(bit_equal(ops::mla_decode(q.narrow(0, n, 1), pages, x.table.narrow(0, n, 1),
                                            x.lengths.narrow(0, n, 1), 512, 0.06, 0),
                            whole.narrow(0, n, 1)))
          << heads << " heads, sequence " << n;
  }
  at::globalContext().setDeterministicAlgorithms(false, false);
}

}  // namespace
}  // namespace godwit::test
