// Causal attention over packed documents of unlike lengths on a GPU, beside each document in fp64.
#include "godwit/ops/attention_documents.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <vector>

#include "godwit/ops/ops.h"
#include "tests/support/compare.h"

namespace godwit {
namespace {

using at::Tensor;

TEST(AttentionDocuments, FewLengths) {
  std::vector<int64_t> lengths;
  for (int64_t tokens = 1; tokens <= 65536; ++tokens) {
    const int64_t planned = ops::planned_length(tokens);
    ASSERT_GE(planned, tokens);
    ASSERT_LE(planned - tokens, std::max<int64_t>(511, tokens / 8)) << tokens;
    if (lengths.empty() || lengths.back() != planned) lengths.push_back(planned);
  }
  EXPECT_LE(lengths.size(), 40u);  // eight an octave: a plan each
}

TEST(AttentionDocuments, EachDocumentOnAGpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  const Tensor cu = at::tensor({0, 2500, 2500, 2503, 3203, 5251, 9351}, at::kLong);
  const int64_t T = 9351, H = 2;
  const double scale = 0.1;
  std::vector<Tensor> half, exact;
  for (const int64_t width : {192, 192, 128}) {
    half.push_back(at::randn({T, H, width}).to(at::kCUDA, at::kBFloat16).requires_grad_(true));
    exact.push_back(half.back().detach().to(at::kDouble).requires_grad_(true));
  }
  ASSERT_TRUE(ops::takes_attention_by_documents(half[0], half[2], cu));
  const Tensor got = ops::attention(half[0], half[1], half[2], cu, cu, scale, /*window=*/0);
  std::vector<Tensor> rows;
  for (int64_t n = 0; n + 1 < cu.numel(); ++n) {
    const int64_t begin = cu[n].item<int64_t>(), count = cu[n + 1].item<int64_t>() - begin;
    const auto heads = [&](const Tensor& x) { return x.narrow(0, begin, count).transpose(0, 1); };
    const Tensor unseen = at::ones({count, count}, half[0].options().dtype(at::kBool)).triu(1);
    const Tensor scores = at::matmul(heads(exact[0]), heads(exact[1]).transpose(1, 2)) * scale;
    const Tensor p = scores.masked_fill(unseen, -std::numeric_limits<double>::infinity()).softmax(-1);
    rows.push_back(at::matmul(p, heads(exact[2])).transpose(0, 1));
  }
  const Tensor want = at::cat(rows);
  EXPECT_TRUE(test::close_norm(got, want, test::kBf16Chain));
  const Tensor grad = at::randn_like(want).to(at::kBFloat16);
  const auto d_got = torch::autograd::grad({got}, half, {grad}),
             d_want = torch::autograd::grad({want}, exact, {grad.to(at::kDouble)});
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(test::close_norm(d_got[i], d_want[i], test::kBf16Chain)) << i;
  EXPECT_TRUE(test::bit_equal(ops::attention(half[0], half[1], half[2], cu, cu, scale, 0), got));
}

}  // namespace
}  // namespace godwit
