#include "godwit/train/qk_clip.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>

#include "godwit/base/check.h"
#include "tests/support/compare.h"

namespace godwit {
namespace {

using at::Tensor;

constexpr MlaHeadDims kDims{.heads = 3, .nope = 4, .rope = 2, .value = 5};

struct Attention {
  Tensor q_b = at::randn({kDims.heads * 6, 7}, at::kDouble) * 5;
  Tensor kv_b = at::randn({kDims.heads * 9, 8}, at::kDouble) * 5;
  Tensor c_q = at::randn({10, 7}, at::kDouble), c_kv = at::randn({10, 8}, at::kDouble);
  Tensor k_pe = at::randn({10, 2}, at::kDouble);

  Tensor logits() const {  // [H, Tq, Tk]
    const Tensor q = c_q.mm(q_b.t()).view({10, kDims.heads, 6});
    const Tensor kv = c_kv.mm(kv_b.t()).view({10, kDims.heads, 9});
    const Tensor k = at::cat({kv.narrow(2, 0, 4), k_pe.unsqueeze(1).expand({10, kDims.heads, 2})}, 2);
    return at::einsum("qhd,khd->hqk", {q, k}) / std::sqrt(6.0);
  }
  Tensor values() const { return c_kv.mm(kv_b.t()).view({10, kDims.heads, 9}).narrow(2, 4, 5); }
};

TEST(QkClip, LogitsOfEachHeadScaleByGammaAndValuesStay) {
  at::manual_seed(1);
  Attention a;
  const Tensor before = a.logits(), values = a.values();
  const Tensor largest = before.amax({1, 2});
  const Tensor sorted = std::get<0>(largest.sort());
  const double threshold = (sorted[0] + sorted[1]).item<double>() / 2;  // clips two heads of three
  const Tensor gamma = (threshold / largest).clamp_max(1);
  ASSERT_EQ((gamma < 1).sum().item<int64_t>(), 2);
  EXPECT_EQ(qk_clip(largest, a.q_b, a.kv_b, kDims, threshold), 2);
  // the factors are fp32
  EXPECT_TRUE(test::close(a.logits(), before * gamma.view({3, 1, 1}), test::kFp32));
  EXPECT_LE(a.logits().max().item<double>(), threshold * (1 + test::kFp32));
  EXPECT_TRUE(test::bit_equal(a.values(), values));
}

TEST(QkClip, HeadsBelowTheThresholdAreUntouched) {
  at::manual_seed(2);
  Attention a;
  const Tensor q = a.q_b.clone(), kv = a.kv_b.clone();
  const Tensor low = at::tensor({1.f, 100.f, -std::numeric_limits<float>::infinity()});
  EXPECT_EQ(qk_clip(low, a.q_b, a.kv_b, kDims, 100), 0);
  EXPECT_TRUE(test::bit_equal(a.q_b, q));
  EXPECT_TRUE(test::bit_equal(a.kv_b, kv));
}

TEST(QkClip, RefusesWrongInput) {
  Attention a;
  EXPECT_THROW(qk_clip(at::ones({2}), a.q_b, a.kv_b, kDims, 100), Error);
  EXPECT_THROW(qk_clip(at::full({3}, std::nan("")), a.q_b, a.kv_b, kDims, 100), Error);
  EXPECT_THROW(qk_clip(at::ones({3}), a.kv_b, a.q_b, kDims, 100), Error);
}

}  // namespace
}  // namespace godwit
