#include "godwit/ops/linear_each.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include <algorithm>

#include "godwit/ops/dispatch.h"

namespace godwit::ops {

TORCH_LIBRARY_FRAGMENT(godwit, m) {
  m.def("linear_each_fwd(Tensor x, Tensor[] weights, Tensor[] scales) -> Tensor[]");
}

std::vector<Tensor> linear_each(const Tensor& x, const std::vector<const Matrix*>& weights) {
  using Each = std::vector<Tensor>(const Tensor&, at::TensorList, at::TensorList);
  const bool packed = weights[0]->packed();
  const bool alike = std::all_of(weights.begin(), weights.end(), [&](const Matrix* w) {
    return w->packed() == packed && w->scalar_type() == (packed ? at::kChar : x.scalar_type());
  });
  std::vector<Tensor> y;
  if (x.is_cuda() && x.scalar_type() == at::kBFloat16 && alike && !at::GradMode::is_enabled()) {
    std::vector<Tensor> values, scales;
    for (const Matrix* w : weights) {
      values.emplace_back(static_cast<const Tensor&>(*w));
      if (packed) scales.push_back(w->scale);
    }
    static const auto op = typed_op<Each>("godwit::linear_each_fwd");
    return op.call(x, values, scales);
  }
  for (const Matrix* w : weights) y.push_back(linear(x, *w));
  return y;
}

}  // namespace godwit::ops
