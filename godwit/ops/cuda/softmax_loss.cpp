// CUDA registration of the cross-entropy of rows: the kernel for fp32 logits with a bf16 gradient; everything
// else takes the plain composition.
#include "godwit/ops/softmax_loss.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "godwit/kernels/layer_gpu.h"
#include "godwit/ops/cuda/launch.h"

namespace godwit::ops {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor> loss_cuda(const Tensor& logits, const Tensor& targets, const Tensor& weights,
                                     bool gradient, at::ScalarType type) {
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAGuard guard(logits.device());
  const bool types = logits.scalar_type() == at::kFloat && (!gradient || type == at::kBFloat16);
  if (!types || logits.size(1) % 8 != 0 || !cuda::is_hopper(logits.device()))
    return softmax_loss_composition(logits, targets, weights, gradient, type);
  const Tensor x = cuda::dense(logits), index = targets.contiguous(),
               weight = weights.to(at::kFloat).contiguous();
  const Tensor nll = at::empty({x.size(0)}, x.options()),
               d = gradient ? at::empty(x.sizes(), x.options().dtype(type)) : Tensor();
  cuda::check_launch("softmax_loss",
                     kernels::cuda::softmax_loss({.logits = cuda::pointer_as<float>(x),
                                                  .targets = cuda::pointer_as<int64_t>(index),
                                                  .weights = cuda::pointer_as<float>(weight),
                                                  .rows = x.size(0),
                                                  .vocabulary = static_cast<int>(x.size(1)),
                                                  .nll = cuda::pointer_as<float>(nll),
                                                  .d_logits = cuda::pointer(d),
                                                  .stream = c10::cuda::getCurrentCUDAStream()}));
  return {nll, d};
}

}  // namespace

TORCH_LIBRARY_IMPL(godwit, CUDA, m) {
  m.impl("softmax_loss_fwd", loss_cuda);
}

}  // namespace godwit::ops
