// linear (and the GEMM below it) against fp64, and what library GEMMs do not promise: rows that do not depend
// on one another.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "godwit/ops/ops.h"
#include "tests/support/gradients.h"

namespace godwit {
namespace {

using at::Tensor;

test::TensorFn op() {
  return [](const auto& x) { return ops::linear(x[0], x[1]); };
}
test::TensorFn oracle() {
  return [](const auto& x) { return at::matmul(x[0], x[1].t()); };
}

TEST(Linear, MatchesOracle) {
  at::manual_seed(1);
  for (const int64_t depth : {1, 16, 17, 256, 257, 600}) {
    for (const int64_t width : {1, 15, 16, 33, 64, 100}) {
      for (const int64_t rows : {0, 1, 4, 8, 9, 15, 16, 17, 63, 64, 65, 257}) {
        const std::vector<Tensor> inputs = {at::randn({rows, depth}), at::randn({width, depth})};
        EXPECT_TRUE(test::close(op()(inputs), oracle()(test::to_double(inputs)), test::kFp32))
            << "M " << rows << " N " << width << " K " << depth;
      }
    }
  }
}

TEST(Linear, GradientsMatchOracle) {
  at::manual_seed(2);
  for (const auto& [rows, width, depth] :
       {std::tuple<int64_t, int64_t, int64_t>{257, 33, 70}, {1, 64, 300}, {17, 1, 5}, {600, 40, 40}}) {
    const std::vector<Tensor> inputs = {at::randn({rows, depth}), at::randn({width, depth})};
    const Tensor projection = at::randn({rows, width});
    const auto got = test::gradients(op(), inputs, projection);
    const auto expected = test::gradients(oracle(), test::to_double(inputs), projection);
    for (size_t i = 0; i < 2; ++i)
      EXPECT_TRUE(test::close(got[i], expected[i], test::kFp32Grad)) << "input " << i;
  }
}

TEST(Linear, ShapesAndStrides) {
  at::manual_seed(3);
  const Tensor x = at::randn({3, 5, 24}), w = at::randn({7, 24});
  EXPECT_TRUE(test::close(ops::linear(x, w), at::linear(x, w), test::kFp32));
  EXPECT_TRUE(test::close(ops::linear(x[0][0], w), at::linear(x[0][0], w), test::kFp32));
  const Tensor wide = at::randn({9, 64});  // a slice of columns, and a transposed weight
  EXPECT_TRUE(
      test::close(ops::linear(wide.narrow(1, 8, 24), w), at::linear(wide.narrow(1, 8, 24), w), test::kFp32));
  const Tensor turned = at::randn({24, 7}).t();
  EXPECT_TRUE(test::close(ops::linear(x, turned), at::linear(x, turned), test::kFp32));
}

// Bit for bit, from the few-row form over its limit to whole blocks.
TEST(Linear, RowsDoNotDependOnEachOther) {
  at::manual_seed(4);
  for (const int64_t depth : {48, 256, 700}) {
    const Tensor x = at::randn({700, depth}), w = at::randn({75, depth});
    const Tensor whole = ops::linear(x, w);
    for (const int64_t n : {1, 3, 4, 5, 8, 9, 16, 200}) {
      EXPECT_TRUE(test::bit_equal(ops::linear(x.narrow(0, 300, n), w), whole.narrow(0, 300, n))) << n;
    }
  }
}

TEST(Linear, ThreadsDoNotMatter) {
  at::manual_seed(5);
  const std::vector<Tensor> inputs = {at::randn({500, 300}), at::randn({200, 300})};
  const Tensor projection = at::randn({500, 200});
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const auto single = test::gradients(op(), inputs, projection);
  at::set_num_threads(3);
  const auto several = test::gradients(op(), inputs, projection);
  at::set_num_threads(threads);
  for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(test::bit_equal(single[i], several[i]));
}

// Memory beside the operands is neither read into the result nor written.
TEST(Linear, StaysInsideItsOperands) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const int64_t rows : {2, 33}) {
    Tensor x = at::full({rows, 40}, nan), w = at::full({21, 40}, nan);
    x.narrow(1, 3, 19).normal_();
    w.narrow(1, 3, 19).normal_();
    const Tensor y = ops::linear(x.narrow(1, 3, 19), w.narrow(1, 3, 19));
    EXPECT_TRUE(at::isfinite(y).all().item<bool>());
  }
}

TEST(Linear, RefusesBadArguments) {
  EXPECT_THROW(ops::linear(at::ones({3, 4}), at::ones({5, 6})), c10::Error);
  EXPECT_THROW(ops::linear(at::ones({3, 4}), at::ones({5, 4}, at::kDouble)), c10::Error);
  EXPECT_THROW(ops::linear(at::ones({3, 4}, at::kLong), at::ones({5, 4}, at::kLong)), c10::Error);
}

}  // namespace
}  // namespace godwit
