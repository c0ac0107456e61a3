#include "godwit/ops/ref/linear_cross_entropy_ref.h"

#include <ATen/ATen.h>

#include "godwit/ops/arguments.h"

namespace godwit::ops::ref {

std::tuple<at::Tensor, at::Tensor> linear_cross_entropy(const at::Tensor& x, const at::Tensor& head,
                                                        const at::Tensor& targets,
                                                        const at::Tensor& weights) {
  const auto work = work_type(x);
  const at::Tensor ignored = targets < 0;
  const at::Tensor logp = at::log_softmax(at::matmul(x.to(work), head.to(work).t()), -1);
  const at::Tensor nll =
      -logp.gather(1, targets.clamp_min(0).unsqueeze(1)).squeeze(1).masked_fill(ignored, 0);
  return {(weights.to(work) * nll).sum(), nll.detach()};
}

}  // namespace godwit::ops::ref
