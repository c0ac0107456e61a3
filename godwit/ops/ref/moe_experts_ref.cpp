#include "godwit/ops/ref/moe_experts_ref.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

#include "godwit/ops/arguments.h"
#include "godwit/ops/ref/glu_ref.h"

namespace godwit::ops::ref {
namespace {

struct Ffn {
  const at::Tensor& w1;  // [E, I, L]
  const at::Tensor& w3;  // [E, I, L]
  const at::Tensor& w2;  // [E, L, I]
  double beta_gate;
  double beta_up;
};

// One product an expert. Unused experts are left out; unbind gives their weights a zero gradient.
at::Tensor by_loop(const at::Tensor& x_ML, const std::vector<int64_t>& counts, const Ffn& ffn) {
  const auto w1 = ffn.w1.unbind(0), w3 = ffn.w3.unbind(0), w2 = ffn.w2.unbind(0);
  const auto rows = x_ML.split_with_sizes(counts);
  std::vector<at::Tensor> out;
  for (size_t e = 0; e < counts.size(); ++e) {
    if (counts[e] == 0) continue;
    const at::Tensor inner =
        glu(at::mm(rows[e], w1[e].t()), at::mm(rows[e], w3[e].t()), ffn.beta_gate, ffn.beta_up);
    out.push_back(at::mm(inner, w2[e].t()));
  }
  return out.empty() ? at::zeros_like(x_ML) : at::cat(out);
}

// Every expert padded to the largest count: one bmm each. place_M: row of the padded matrix.
at::Tensor by_padding(const at::Tensor& x_ML, const at::Tensor& place_M, int64_t capacity, const Ffn& ffn) {
  const int64_t experts = ffn.w1.size(0), width = x_ML.size(1);
  const at::Tensor padded = at::zeros({experts * capacity, width}, x_ML.options())
                                .index_copy(0, place_M, x_ML)
                                .view({experts, capacity, width});
  const at::Tensor inner = glu(at::bmm(padded, ffn.w1.transpose(1, 2)),
                               at::bmm(padded, ffn.w3.transpose(1, 2)), ffn.beta_gate, ffn.beta_up);
  return at::bmm(inner, ffn.w2.transpose(1, 2)).view({experts * capacity, width}).index_select(0, place_M);
}

// PyTorch's grouped GEMM: bf16, every row stride a multiple of 16 bytes.
at::Tensor by_grouped_mm(const at::Tensor& x_ML, const at::Tensor& ends_E, const Ffn& ffn) {
  const at::Tensor inner =
      glu(at::_grouped_mm(x_ML, ffn.w1.transpose(1, 2), ends_E),
          at::_grouped_mm(x_ML, ffn.w3.transpose(1, 2), ends_E), ffn.beta_gate, ffn.beta_up);
  return at::_grouped_mm(inner, ffn.w2.transpose(1, 2), ends_E);
}

at::Tensor sorted_ffn(const at::Tensor& x_ML, const at::Tensor& sorted_expert_M, const Ffn& ffn) {
  const int64_t experts = ffn.w1.size(0);
  // As bincount, which on a GPU would wait for it.
  const at::Tensor counts_E = at::zeros({experts}, sorted_expert_M.options())
                                  .scatter_add_(0, sorted_expert_M, at::ones_like(sorted_expert_M));
  if (x_ML.is_cuda() && x_ML.scalar_type() == at::kBFloat16 && ffn.w1.size(1) % 8 == 0 &&
      ffn.w1.size(2) % 8 == 0) {
    return by_grouped_mm(x_ML, counts_E.cumsum(0).to(at::kInt), ffn);
  }
  const at::Tensor counts_cpu = counts_E.to(at::kCPU);
  const std::vector<int64_t> counts(counts_cpu.data_ptr<int64_t>(), counts_cpu.data_ptr<int64_t>() + experts);
  const int64_t capacity = *std::max_element(counts.begin(), counts.end());
  // Padding costs at most four times the work; beyond that (one expert holds most tokens) the loop is better.
  if (x_ML.is_cuda() && experts * capacity <= 4 * x_ML.size(0)) {
    const at::Tensor first_E = counts_E.cumsum(0) - counts_E;
    const at::Tensor within_M =
        at::arange(x_ML.size(0), counts_E.options()) - first_E.index_select(0, sorted_expert_M);
    return by_padding(x_ML, sorted_expert_M * capacity + within_M, capacity, ffn);
  }
  return by_loop(x_ML, counts, ffn);
}

}  // namespace

at::Tensor moe_experts(const at::Tensor& z, const at::Tensor& experts, const at::Tensor& weights,
                       const at::Tensor& w1, const at::Tensor& w3, const at::Tensor& w2, double beta_gate,
                       double beta_up) {
  const int64_t tokens = z.size(0), k = experts.size(1), width = z.size(1);
  if (tokens * k == 0) return (z * 0 + weights.sum() * 0).to(z.scalar_type());
  const auto [sorted_expert, order] =
      at::sort(experts.reshape({-1}).to(at::kLong), /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const at::Tensor x = z.index_select(0, at::floor_divide(order, k));
  const at::Tensor y = sorted_ffn(x, sorted_expert, {w1, w3, w2, beta_gate, beta_up});
  const at::Tensor place = at::empty_like(order).scatter_(0, order, at::arange(tokens * k, order.options()));
  const at::Tensor y_TkL = y.index_select(0, place).view({tokens, k, width}).to(work_type(z));
  return (y_TkL * weights.to(work_type(z)).unsqueeze(-1)).sum(1).to(z.scalar_type());
}

}  // namespace godwit::ops::ref
