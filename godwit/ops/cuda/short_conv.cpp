// CUDA registration of the short convolution: the fused kernels for bf16 inputs and four taps; everything
// else takes the plain composition.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "godwit/kernels/kda_params.h"
#include "godwit/ops/cuda/launch.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/short_conv_ref.h"

namespace godwit::ops {
namespace {

namespace gpu = kernels::cuda;
using std::optional;

constexpr int64_t kTaps = 4;
constexpr int64_t kMaxStrips = 65535;  // of 64 tokens: a launch's second dimension

bool has_kernels(const Tensor& x, const Tensor& weight, const optional<Tensor>& initial_state,
                 const Tensor& cu_seqlens) {
  const int64_t sequences = cu_seqlens.numel() - 1;
  return x.scalar_type() == at::kBFloat16 && weight.size(1) == kTaps && x.size(1) % 8 == 0 && x.size(1) > 0 &&
         sequences > 0 && x.size(0) / 64 + sequences <= kMaxStrips &&
         (!initial_state.has_value() || initial_state->scalar_type() == at::kBFloat16);
}

// The kernels' view of the arguments, and the tensors that keep it alive.
struct Inputs {
  Tensor x, weight, state;
  cuda::Offsets offsets;
  gpu::ShortConvParams raw;

  Inputs(const Tensor& x_in, const Tensor& weight_in, const optional<Tensor>& state_in, const Tensor& cu)
      : x(cuda::dense(x_in)),
        weight(cuda::dense(weight_in)),
        offsets(cuda::device_offsets(cu, x_in.device())) {
    if (state_in.has_value()) state = cuda::dense(*state_in);
    raw.x = cuda::pointer(x);
    raw.weight = cuda::pointer_as<float>(weight);
    raw.initial_state = cuda::pointer(state);
    raw.cu_seqlens = offsets.data;
    raw.T = x.size(0), raw.C = x.size(1), raw.N = static_cast<int>(cu.numel() - 1);
    raw.stream = c10::cuda::getCurrentCUDAStream();
  }
};

std::tuple<Tensor, Tensor> forward_cuda(const Tensor& x, const Tensor& weight,
                                        const optional<Tensor>& initial_state, const Tensor& cu_seqlens) {
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAGuard guard(x.device());
  if (!has_kernels(x, weight, initial_state, cu_seqlens))
    return ref::short_conv_ref(x, weight, initial_state, cu_seqlens);
  Inputs in(x, weight, initial_state, cu_seqlens);
  const Tensor y = at::empty(x.sizes(), x.options());
  const Tensor final_state = at::empty({in.raw.N, x.size(1), kTaps - 1}, x.options());
  in.raw.y = cuda::pointer(y), in.raw.final_state = cuda::pointer(final_state);
  cuda::check_launch("short_conv", gpu::short_conv_fwd(in.raw));
  return {y, final_state};
}

std::tuple<Tensor, Tensor, Tensor> backward_cuda(const optional<Tensor>& grad_y,
                                                 const optional<Tensor>& grad_final_state, const Tensor& x,
                                                 const Tensor& weight, const optional<Tensor>& initial_state,
                                                 const Tensor& cu_seqlens) {
  const c10::cuda::CUDAGuard guard(x.device());
  if (!has_kernels(x, weight, initial_state, cu_seqlens))
    return ref::short_conv_ref_grads(grad_y, grad_final_state, x, weight, initial_state, cu_seqlens);
  const at::NoGradGuard no_grad;
  Inputs in(x, weight, initial_state, cu_seqlens);
  const auto given = [](const Tensor& t) { return cuda::dense(t.to(at::kBFloat16)); };
  const Tensor dy = grad_y.has_value() ? given(*grad_y) : at::zeros_like(in.x);
  const Tensor d_final = grad_final_state.has_value() ? given(*grad_final_state) : Tensor();
  const auto like = [](const Tensor& t) { return at::empty(t.sizes(), t.options()); };
  const Tensor dx = like(x), dweight = like(weight),
               dstate = initial_state.has_value() ? like(*initial_state) : Tensor();
  const Tensor space = cuda::workspace(gpu::short_conv_bwd_workspace_bytes(in.raw), x.device());
  in.raw.dy = cuda::pointer(dy), in.raw.d_final_state = cuda::pointer(d_final);
  in.raw.dx = cuda::pointer(dx), in.raw.dweight = cuda::pointer_as<float>(dweight);
  in.raw.d_initial_state = cuda::pointer(dstate), in.raw.workspace = cuda::pointer(space);
  cuda::check_launch("short_conv backward", gpu::short_conv_bwd(in.raw));
  return {dx, dweight, dstate};
}

}  // namespace

TORCH_LIBRARY_IMPL(godwit, CUDA, m) {
  m.impl("short_conv_fwd", forward_cuda);
  m.impl("short_conv_bwd", backward_cuda);
}

}  // namespace godwit::ops
