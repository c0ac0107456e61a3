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

Tensor loss_cuda(const Tensor& logits, const Tensor& targets, const Tensor& weights,
                 const std::optional<Tensor>& d_logits) {
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAGuard guard(logits.device());
  const bool usable = !d_logits.has_value() || (d_logits->scalar_type() == at::kBFloat16 &&
                                                d_logits->is_contiguous() && cuda::aligned(*d_logits));
  if (logits.scalar_type() != at::kFloat || !usable || logits.size(1) % 8 != 0 ||
      !cuda::is_hopper(logits.device()))
    return softmax_loss_composition(logits, targets, weights, d_logits);
  const Tensor x = cuda::dense(logits), index = targets.contiguous(),
               weight = weights.to(at::kFloat).contiguous();
  const Tensor nll = at::empty({x.size(0)}, x.options());
  cuda::check_launch("softmax_loss",
                     kernels::cuda::softmax_loss({.logits = cuda::pointer_as<float>(x),
                                                  .targets = cuda::pointer_as<int64_t>(index),
                                                  .weights = cuda::pointer_as<float>(weight),
                                                  .rows = x.size(0),
                                                  .vocabulary = static_cast<int>(x.size(1)),
                                                  .nll = cuda::pointer_as<float>(nll),
                                                  .d_logits = cuda::pointer(d_logits.value_or(Tensor())),
                                                  .stream = c10::cuda::getCurrentCUDAStream()}));
  return nll;
}

// The gradient of a head is large, and PyTorch's product with a tensor of one element is slow.
Tensor scaled_cuda(const Tensor& x, const Tensor& factor, at::ScalarType type) {
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAGuard guard(x.device());
  const bool usable = (x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kFloat) &&
                      type == at::kBFloat16 && x.is_contiguous() && cuda::aligned(x) && x.numel() % 8 == 0 &&
                      factor.is_cuda() && factor.scalar_type() == at::kFloat;
  if (!usable || !cuda::is_hopper(x.device())) return scaled_composition(x, factor, type);
  const Tensor out = at::empty(x.sizes(), x.options().dtype(type));
  cuda::check_launch("scaled", kernels::cuda::scaled({.x = cuda::weight_vector(x),
                                                      .factor = cuda::pointer_as<float>(factor),
                                                      .n = x.numel(),
                                                      .out = cuda::pointer(out),
                                                      .stream = c10::cuda::getCurrentCUDAStream()}));
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(godwit, CUDA, m) {
  m.impl("softmax_loss_fwd", loss_cuda);
  m.impl("scaled_fwd", scaled_cuda);
}

}  // namespace godwit::ops
