// CUDA registration of the RMS norms: the kernels for bf16 rows of up to 8,192; everything else takes the
// plain composition.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "godwit/kernels/layer_gpu.h"
#include "godwit/ops/cuda/launch.h"
#include "godwit/ops/ref/norm_ref.h"

namespace godwit::ops {
namespace {

namespace gpu = kernels::cuda;
using at::Tensor;
using std::optional;

bool has_kernel(const Tensor& x, const optional<Tensor>& gate, const Tensor& weight) {
  const int64_t width = x.size(-1);
  const bool types = x.scalar_type() == at::kBFloat16 && cuda::is_weight(weight) &&
                     (!gate.has_value() || gate->scalar_type() == at::kBFloat16);
  return types && width > 0 && width % 8 == 0 && width <= gpu::kNormMaxWidth && cuda::is_hopper(x.device());
}

// The kernels' view of the arguments. Rows of a matrix may be apart, as slices of a projection are.
struct Inputs {
  Tensor x, gate, weight;
  gpu::NormParams raw;

  Inputs(const Tensor& x_in, const optional<Tensor>& gate_in, const Tensor& weight_in, double eps)
      : weight(weight_in.contiguous()) {
    const bool apart = x_in.dim() == 2 && x_in.stride(1) == 1 && x_in.stride(0) % 8 == 0 &&
                       x_in.stride(0) > 0 && cuda::aligned(x_in);
    x = apart ? x_in : cuda::dense(x_in);
    if (gate_in.has_value()) gate = cuda::dense(*gate_in);
    raw = {.x = cuda::pointer(x),
           .gate = cuda::pointer(gate),
           .weight = cuda::weight_vector(weight),
           .rows = x.numel() / x.size(-1),
           .width = static_cast<int>(x.size(-1)),
           .x_stride = apart ? x.stride(0) : 0,
           .eps = static_cast<float>(eps),
           .stream = c10::cuda::getCurrentCUDAStream()};
  }
};

Tensor fwd_cuda(const Tensor& x, const optional<Tensor>& gate, const Tensor& weight, double eps) {
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAGuard guard(x.device());
  if (!has_kernel(x, gate, weight)) {
    return gate.has_value() ? ref::rms_norm_gated_ref(x, *gate, weight, eps)
                            : ref::rms_norm_ref(x, weight, eps);
  }
  Inputs in(x, gate, weight, eps);
  const Tensor y = at::empty(x.sizes(), x.options());
  in.raw.y = cuda::pointer(y);
  cuda::check_launch("rms_norm", gpu::rms_norm_fwd(in.raw));
  return y;
}

std::tuple<Tensor, Tensor, Tensor> bwd_cuda(const Tensor& grad, const Tensor& x, const optional<Tensor>& gate,
                                            const Tensor& weight, double eps) {
  const c10::cuda::CUDAGuard guard(x.device());
  if (!has_kernel(x, gate, weight)) return ref::rms_norm_ref_grads(grad, x, gate, weight, eps);
  const at::NoGradGuard no_grad;
  Inputs in(x, gate, weight, eps);
  const Tensor dy = cuda::dense(grad.to(at::kBFloat16)), dx = at::empty(x.sizes(), x.options()),
               dgate = gate.has_value() ? at::empty(x.sizes(), x.options()) : Tensor(),
               dweight = at::zeros(weight.sizes(), weight.options());
  const Tensor space = cuda::workspace(gpu::rms_norm_bwd_workspace_bytes(in.raw), x.device());
  in.raw.dy = cuda::pointer(dy), in.raw.dx = cuda::pointer(dx), in.raw.dgate = cuda::pointer(dgate);
  in.raw.dweight = cuda::weight_gradient(dweight), in.raw.workspace = cuda::pointer(space);
  cuda::check_launch("rms_norm backward", gpu::rms_norm_bwd(in.raw));
  return {dx, dgate, dweight};
}

}  // namespace

TORCH_LIBRARY_IMPL(godwit, CUDA, m) {
  m.impl("rms_norm_fwd", fwd_cuda);
  m.impl("rms_norm_bwd", bwd_cuda);
}

}  // namespace godwit::ops
