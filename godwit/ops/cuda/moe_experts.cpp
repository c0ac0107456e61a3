// CUDA registration of the routed experts: the Hopper kernels for bf16 (docs/moe_cuda.md); everything else
// takes the plain composition.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

#include "godwit/kernels/moe_experts_cuda.h"
#include "godwit/ops/arguments.h"
#include "godwit/ops/cuda/launch.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/moe_experts_ref.h"
#include "godwit/ops/ref/quantized_ref.h"

namespace godwit::ops {
namespace {

namespace gpu = kernels::cuda;

kernels::MoeShape shape_of(const Tensor& z, const Tensor& experts, int64_t count, int64_t inner,
                           double beta_gate, double beta_up) {
  return {.tokens = z.size(0),
          .k = experts.size(1),
          .experts = count,
          .width = z.size(1),
          .inner = inner,
          .form = {.beta_gate = static_cast<float>(beta_gate), .beta_up = static_cast<float>(beta_up)}};
}

// Whether the Hopper kernels take these arguments.
bool has_kernels(const Tensor& z, const Tensor& w1, const kernels::MoeShape& shape,
                 kernels::MoeFormat format) {
  const at::ScalarType stored = format == kernels::MoeFormat::kBf16   ? at::kBFloat16
                                : format == kernels::MoeFormat::kInt8 ? at::kChar
                                                                      : at::kByte;
  return z.scalar_type() == at::kBFloat16 && w1.scalar_type() == stored &&
         gpu::moe_experts_fwd_takes(shape, format) && cuda::is_hopper(z.device());
}

// The kernels' view of the activations, and the tensors that keep it alive.
struct Inputs {
  Tensor z, experts, weights;
  Inputs(const Tensor& z_in, const Tensor& experts_in, const Tensor& weights_in)
      : z(cuda::dense(z_in)),
        experts(cuda::dense(experts_in)),
        weights(cuda::dense(weights_in.to(at::kFloat))) {}
};

Tensor run_forward(const Inputs& in, const kernels::MoeShape& shape, const kernels::MoeWeights& w,
                   const Tensor& saved = {}) {
  const Tensor out = at::empty(in.z.sizes(), in.z.options());
  const Tensor space = cuda::workspace(gpu::moe_experts_fwd_workspace_bytes(shape), in.z.device());
  cuda::check_launch("moe_experts", gpu::moe_experts_fwd({.shape = shape,
                                                          .w = w,
                                                          .z = cuda::pointer(in.z),
                                                          .experts = cuda::pointer_as<int32_t>(in.experts),
                                                          .weights = cuda::pointer_as<float>(in.weights),
                                                          .out = cuda::pointer(out),
                                                          .saved = cuda::pointer(saved),
                                                          .workspace = cuda::pointer(space),
                                                          .stream = c10::cuda::getCurrentCUDAStream()}));
  return out;
}

// keep: both products of every row, in bf16 and the experts' order (moe_experts_cuda.h).
std::tuple<Tensor, Tensor> forward_cuda(const Tensor& z, const Tensor& experts, const Tensor& weights,
                                        const Tensor& w1, const Tensor& w3, const Tensor& w2,
                                        double beta_gate, double beta_up, bool keep) {
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAGuard guard(z.device());
  Tensor saved = at::empty({0}, z.options().dtype(work_type(z)));
  const auto shape = shape_of(z, experts, w1.size(0), w1.size(1), beta_gate, beta_up);
  if (!has_kernels(z, w1, shape, kernels::MoeFormat::kBf16)) {
    return {ref::moe_experts(z, experts, weights, w1, w3, w2, beta_gate, beta_up), saved};
  }
  if (keep) {
    saved = at::empty({static_cast<int64_t>(gpu::moe_experts_saved_bytes(shape) / 2)},
                      z.options().dtype(at::kBFloat16));
  }
  const Tensor a = cuda::dense(w1), b = cuda::dense(w3), c = cuda::dense(w2);
  return {run_forward(Inputs(z, experts, weights), shape,
                      {.w1 = cuda::pointer(a),
                       .w3 = cuda::pointer(b),
                       .w2 = cuda::pointer(c),
                       .format = kernels::MoeFormat::kBf16},
                      saved),
          saved};
}

// By autograd on the plain composition.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> plain_backward(const Tensor& d_out,
                                                                  torch::autograd::variable_list leaves,
                                                                  const Tensor& experts, double beta_gate,
                                                                  double beta_up,
                                                                  std::array<bool, 3> wanted) {
  const at::AutoGradMode with_grad(true);
  const bool wants[] = {wanted[0], wanted[1], wanted[2], wanted[2], wanted[2]};
  torch::autograd::variable_list asked;
  for (size_t i = 0; i < leaves.size(); ++i) {
    leaves[i] = leaves[i].detach().requires_grad_(wants[i]);
    if (wants[i]) asked.push_back(leaves[i]);
  }
  std::array<Tensor, 5> grads;
  if (!asked.empty()) {
    const Tensor out =
        ref::moe_experts(leaves[0], experts, leaves[1], leaves[2], leaves[3], leaves[4], beta_gate, beta_up);
    const auto got = torch::autograd::grad({out}, asked, {d_out});
    for (size_t i = 0, next = 0; i < grads.size(); ++i) {
      if (wants[i]) grads[i] = got[next++];
    }
  }
  return {grads[0], grads[1], grads[2], grads[3], grads[4]};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward_cuda(const Tensor& d_out, const Tensor& saved,
                                                                 const Tensor& z, const Tensor& experts,
                                                                 const Tensor& weights, const Tensor& w1,
                                                                 const Tensor& w3, const Tensor& w2,
                                                                 double beta_gate, double beta_up,
                                                                 std::array<bool, 3> wanted) {
  const c10::cuda::CUDAGuard guard(z.device());
  const auto shape = shape_of(z, experts, w1.size(0), w1.size(1), beta_gate, beta_up);
  if (!has_kernels(z, w1, shape, kernels::MoeFormat::kBf16)) {
    return plain_backward(d_out, {z, weights, w1, w3, w2}, experts, beta_gate, beta_up, wanted);
  }
  const at::NoGradGuard no_grad;
  const Inputs in(z, experts, weights);
  const Tensor a = cuda::dense(w1), b = cuda::dense(w3), c = cuda::dense(w2),
               d = cuda::dense(d_out.to(at::kBFloat16));
  const auto like = [](const Tensor& t, bool want) {
    return want ? at::empty(t.sizes(), t.options()) : Tensor();
  };
  const Tensor d_z = like(in.z, wanted[0]), d_weights = like(in.weights, wanted[1]),
               d_w1 = like(a, wanted[2]), d_w3 = like(b, wanted[2]), d_w2 = like(c, wanted[2]);
  const Tensor space = cuda::workspace(gpu::moe_experts_bwd_workspace_bytes(shape), z.device());
  cuda::check_launch("moe_experts backward",
                     gpu::moe_experts_bwd({.shape = shape,
                                           .w = {.w1 = cuda::pointer(a),
                                                 .w3 = cuda::pointer(b),
                                                 .w2 = cuda::pointer(c),
                                                 .format = kernels::MoeFormat::kBf16},
                                           .z = cuda::pointer(in.z),
                                           .experts = cuda::pointer_as<int32_t>(in.experts),
                                           .weights = cuda::pointer_as<float>(in.weights),
                                           .saved = cuda::pointer(saved),
                                           .d_out = cuda::pointer(d),
                                           .d_z = cuda::pointer(d_z),
                                           .d_weights = cuda::pointer_as<float>(d_weights),
                                           .d_w1 = cuda::pointer(d_w1),
                                           .d_w3 = cuda::pointer(d_w3),
                                           .d_w2 = cuda::pointer(d_w2),
                                           .workspace = cuda::pointer(space),
                                           .stream = c10::cuda::getCurrentCUDAStream()}));
  return {d_z, wanted[1] ? d_weights.to(weights.scalar_type()) : d_weights, d_w1, d_w3, d_w2};
}

// What the kernels do not take is unpacked to z's type.
Tensor quantized_cuda(const Tensor& z, const Tensor& experts, const Tensor& weights, const Tensor& w1,
                      const Tensor& s1, const Tensor& w3, const Tensor& s3, const Tensor& w2,
                      const Tensor& s2, double beta_gate, double beta_up) {
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAGuard guard(z.device());
  const auto shape = shape_of(z, experts, w1.size(0), w1.size(1), beta_gate, beta_up);
  const auto format = w1.scalar_type() == at::kChar ? kernels::MoeFormat::kInt8 : kernels::MoeFormat::kMxfp4;
  if (!has_kernels(z, w1, shape, format)) {
    const auto plain = [&](const Tensor& w, const Tensor& s) {
      return ref::dequantize(w, s).to(z.scalar_type());
    };
    return moe_experts(z, experts, weights, plain(w1, s1), plain(w3, s3), plain(w2, s2), beta_gate, beta_up);
  }
  const Tensor packed[] = {cuda::dense(w1), cuda::dense(w3), cuda::dense(w2)};
  const Tensor scales[] = {cuda::dense(s1), cuda::dense(s3), cuda::dense(s2)};
  return run_forward(Inputs(z, experts, weights), shape,
                     {.w1 = cuda::pointer(packed[0]),
                      .w3 = cuda::pointer(packed[1]),
                      .w2 = cuda::pointer(packed[2]),
                      .s1 = cuda::pointer(scales[0]),
                      .s3 = cuda::pointer(scales[1]),
                      .s2 = cuda::pointer(scales[2]),
                      .format = format});
}

}  // namespace

TORCH_LIBRARY_IMPL(godwit, CUDA, m) {
  m.impl("moe_experts_fwd", forward_cuda);
  m.impl("moe_experts_bwd", backward_cuda);
  m.impl("moe_experts_quantized_fwd", quantized_cuda);
}

}  // namespace godwit::ops
