// CUDA registration of Muon's elementwise passes: the kernels for fp32 state and a bf16 update; everything
// else takes the composition.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "godwit/kernels/muon_gpu.h"
#include "godwit/ops/cuda/launch.h"
#include "godwit/ops/ref/muon_ref.h"

namespace godwit::ops {
namespace {

namespace gpu = kernels::cuda;
using at::Tensor;

bool fits(const Tensor& x, const Tensor& state, at::ScalarType type) {
  return x.scalar_type() == type && x.sizes() == state.sizes() && x.is_contiguous() && cuda::aligned(x);
}

bool has_kernel(const Tensor& state, const Tensor& update) {
  return state.numel() % 8 == 0 && cuda::is_hopper(state.device()) && fits(state, state, at::kFloat) &&
         fits(update, state, at::kBFloat16);
}

void momentum_cuda(Tensor& momentum, const Tensor& grad, Tensor& update, double grad_scale, double mu,
                   bool nesterov) {
  const c10::cuda::CUDAGuard guard(momentum.device());
  if (!has_kernel(momentum, update) || !cuda::is_weight(grad) || !fits(grad, momentum, grad.scalar_type()))
    return ref::muon_momentum_(momentum, grad, update, grad_scale, mu, nesterov);
  cuda::check_launch("muon_momentum_", gpu::muon_momentum({.n = momentum.numel(),
                                                           .grad = cuda::pointer(grad),
                                                           .grad_bf16 = grad.scalar_type() == at::kBFloat16,
                                                           .momentum = cuda::pointer_as<float>(momentum),
                                                           .update = cuda::pointer(update),
                                                           .grad_scale = static_cast<float>(grad_scale),
                                                           .mu = static_cast<float>(mu),
                                                           .nesterov = nesterov,
                                                           .stream = c10::cuda::getCurrentCUDAStream()}));
}

void weight_cuda(Tensor& weight, const Tensor& update, const std::optional<Tensor>& copy, double keep,
                 double rate) {
  const c10::cuda::CUDAGuard guard(weight.device());
  if (!has_kernel(weight, update) || (copy && !fits(*copy, weight, at::kBFloat16)))
    return ref::muon_weight_(weight, update, copy, keep, rate);
  cuda::check_launch("muon_weight_", gpu::muon_weight({.n = weight.numel(),
                                                       .update = cuda::pointer(update),
                                                       .weight = cuda::pointer_as<float>(weight),
                                                       .copy = copy ? cuda::pointer(*copy) : nullptr,
                                                       .keep = static_cast<float>(keep),
                                                       .rate = static_cast<float>(rate),
                                                       .stream = c10::cuda::getCurrentCUDAStream()}));
}

void mirror_cuda(Tensor& batch, int64_t block) {
  const c10::cuda::CUDAGuard guard(batch.device());
  const bool fits = batch.scalar_type() == at::kBFloat16 && batch.is_contiguous() && cuda::aligned(batch) &&
                    cuda::is_hopper(batch.device()) && batch.size(1) % 64 == 0 && block % 64 == 0 &&
                    batch.size(0) <= 65535;
  if (!fits) return ref::mirror_lower_(batch, block);
  cuda::check_launch("mirror_lower_", gpu::mirror_lower({.n = batch.size(0),
                                                         .side = static_cast<int>(batch.size(1)),
                                                         .block = static_cast<int>(block),
                                                         .x = cuda::pointer(batch),
                                                         .stream = c10::cuda::getCurrentCUDAStream()}));
}

TORCH_LIBRARY_IMPL(godwit, CUDA, m) {
  m.impl("mirror_lower_", mirror_cuda);
  m.impl("muon_momentum_", momentum_cuda);
  m.impl("muon_weight_", weight_cuda);
}

}  // namespace
}  // namespace godwit::ops
