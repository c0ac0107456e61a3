// CUDA registration of the gated linear unit: the kernels for bf16; everything else takes the composition.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "godwit/kernels/layer_gpu.h"
#include "godwit/ops/autograd_util.h"
#include "godwit/ops/cuda/launch.h"
#include "godwit/ops/ref/glu_ref.h"

namespace godwit::ops {
namespace {

namespace gpu = kernels::cuda;
using at::Tensor;

bool has_kernel(const Tensor& g) {
  return g.scalar_type() == at::kBFloat16 && g.numel() % 8 == 0 && cuda::is_hopper(g.device());
}

Tensor fwd_cuda(const Tensor& g, const Tensor& u, double beta_gate, double beta_up) {
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAGuard guard(g.device());
  if (!has_kernel(g)) return ref::glu(g, u, beta_gate, beta_up);
  const Tensor gate = cuda::dense(g), up = cuda::dense(u), out = at::empty(g.sizes(), gate.options());
  cuda::check_launch("glu", gpu::glu_fwd({.n = gate.numel(),
                                          .beta_gate = static_cast<float>(beta_gate),
                                          .beta_up = static_cast<float>(beta_up),
                                          .g = cuda::pointer(gate),
                                          .u = cuda::pointer(up),
                                          .out = cuda::pointer(out),
                                          .stream = c10::cuda::getCurrentCUDAStream()}));
  return out;
}

std::tuple<Tensor, Tensor> bwd_cuda(const Tensor& d_out, const Tensor& g, const Tensor& u, double beta_gate,
                                    double beta_up) {
  const c10::cuda::CUDAGuard guard(g.device());
  if (!has_kernel(g)) {
    const auto grads = composition_grads({g, u}, {d_out}, [&](const torch::autograd::variable_list& x) {
      return torch::autograd::variable_list{ref::glu(x[0], x[1], beta_gate, beta_up)};
    });
    return {grads[0], grads[1]};
  }
  const at::NoGradGuard no_grad;
  const Tensor gate = cuda::dense(g), up = cuda::dense(u), d = cuda::dense(d_out.to(at::kBFloat16));
  const Tensor d_g = at::empty(g.sizes(), gate.options()), d_u = at::empty(g.sizes(), gate.options());
  cuda::check_launch("glu backward", gpu::glu_bwd({.n = gate.numel(),
                                                   .beta_gate = static_cast<float>(beta_gate),
                                                   .beta_up = static_cast<float>(beta_up),
                                                   .g = cuda::pointer(gate),
                                                   .u = cuda::pointer(up),
                                                   .d_out = cuda::pointer(d),
                                                   .d_g = cuda::pointer(d_g),
                                                   .d_u = cuda::pointer(d_u),
                                                   .stream = c10::cuda::getCurrentCUDAStream()}));
  return {d_g, d_u};
}

}  // namespace

TORCH_LIBRARY_IMPL(godwit, CUDA, m) {
  m.impl("glu_fwd", fwd_cuda);
  m.impl("glu_bwd", bwd_cuda);
}

}  // namespace godwit::ops
