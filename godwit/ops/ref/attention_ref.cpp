#include "godwit/ops/ref/attention_ref.h"

#include <ATen/ATen.h>

#include <limits>
#include <vector>

#include "godwit/ops/arguments.h"

namespace godwit::ops::ref {

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cu_q,
                     const at::Tensor& cu_k, double scale, int64_t window) {
  const auto work = work_type(q);
  const auto* bounds_q = cu_q.const_data_ptr<int64_t>();
  const auto* bounds_k = cu_k.const_data_ptr<int64_t>();
  std::vector<at::Tensor> out;
  for (int64_t n = 0; n + 1 < cu_q.numel(); ++n) {
    const int64_t len_q = bounds_q[n + 1] - bounds_q[n], len_k = bounds_k[n + 1] - bounds_k[n];
    const at::Tensor q_HTK = q.narrow(0, bounds_q[n], len_q).transpose(0, 1).to(work);
    const at::Tensor k_HTK = k.narrow(0, bounds_k[n], len_k).transpose(0, 1).to(work);
    const at::Tensor v_HTV = v.narrow(0, bounds_k[n], len_k).transpose(0, 1).to(work);
    const auto index = q.options().dtype(at::kLong);
    // How far a key lies behind its query; negative = in the future.
    const at::Tensor behind =
        at::arange(len_k - len_q, len_k, index).unsqueeze(1) - at::arange(len_k, index).unsqueeze(0);
    at::Tensor hidden = behind < 0;
    if (window > 0) hidden = hidden.logical_or(behind >= window);
    const at::Tensor score = (at::matmul(q_HTK, k_HTK.transpose(1, 2)) * scale)
                                 .masked_fill(hidden, -std::numeric_limits<double>::infinity());
    out.push_back(at::matmul(at::softmax(score, -1), v_HTV).transpose(0, 1).to(q.scalar_type()));
  }
  return out.empty() ? at::zeros({0, v.size(1), v.size(2)}, q.options()) : at::cat(out);
}

}  // namespace godwit::ops::ref
