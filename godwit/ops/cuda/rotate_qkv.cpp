// CUDA registration of rotate_qkv: the kernels for Hopper; elsewhere the composition.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "godwit/kernels/rotate_qkv.h"
#include "godwit/ops/cuda/launch.h"
#include "godwit/ops/ref/rotate_ref.h"

namespace godwit::ops {
namespace {

namespace gpu = kernels::cuda;
using at::Tensor;

gpu::RotateParams params_of(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& qkv,
                            const Tensor& turns) {
  return {.rows = qkv.size(0),
          .heads = static_cast<int>(qkv.size(2)),
          .width = static_cast<int>(qkv.size(3)),
          .turns = cuda::pointer_as<float>(turns),
          .q = cuda::pointer(q),
          .k = cuda::pointer(k),
          .v = cuda::pointer(v),
          .qkv = cuda::pointer(qkv),
          .stream = c10::cuda::getCurrentCUDAStream()};
}

std::tuple<Tensor, Tensor, Tensor> fwd_cuda(const Tensor& qkv_in, const Tensor& turns_in) {
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAGuard guard(qkv_in.device());
  if (!cuda::is_hopper(qkv_in.device())) return ref::rotate_qkv(qkv_in, turns_in);
  const Tensor qkv = cuda::dense(qkv_in), turns = cuda::dense(turns_in);
  const auto part = [&] { return at::empty({qkv.size(0), qkv.size(2), qkv.size(3)}, qkv.options()); };
  const Tensor q = part(), k = part(), v = part();
  cuda::check_launch("rotate_qkv", gpu::rotate_qkv_fwd(params_of(q, k, v, qkv, turns)));
  return {q, k, v};
}

Tensor bwd_cuda(const Tensor& d_q, const Tensor& d_k, const Tensor& d_v, const Tensor& turns_in) {
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAGuard guard(turns_in.device());
  const Tensor& known = d_q.defined() ? d_q : d_k.defined() ? d_k : d_v;
  const auto given = [&](const Tensor& x) { return cuda::dense(x.defined() ? x : at::zeros_like(known)); };
  const Tensor q = given(d_q), k = given(d_k), v = given(d_v), turns = cuda::dense(turns_in);
  if (!cuda::is_hopper(turns.device())) return ref::rotate_qkv_grad(q, k, v, turns);
  const Tensor d_qkv = at::empty({q.size(0), 3, q.size(1), q.size(2)}, q.options());
  cuda::check_launch("rotate_qkv backward", gpu::rotate_qkv_bwd(params_of(q, k, v, d_qkv, turns)));
  return d_qkv;
}

}  // namespace

TORCH_LIBRARY_IMPL(godwit, CUDA, m) {
  m.impl("rotate_qkv_fwd", fwd_cuda);
  m.impl("rotate_qkv_bwd", bwd_cuda);
}

}  // namespace godwit::ops
