// CUDA registration of mla_decode: our kernel for bf16 rows in pages of 64 (kernels/cuda/mla_decode.cu);
// everything else takes the plain composition.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "godwit/kernels/mla_decode_params.h"
#include "godwit/ops/cuda/launch.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/mla_decode_ref.h"

namespace godwit::ops {
namespace {

namespace gpu = kernels::cuda;

Tensor fwd_cuda(const Tensor& q, const Tensor& pages, const Tensor& table, const Tensor& lengths,
                int64_t rank, double scale, int64_t window) {
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAGuard guard(q.device());
  const bool bf16 = q.scalar_type() == at::kBFloat16 && pages.scalar_type() == at::kBFloat16;
  const bool supported = bf16 && pages.is_contiguous() && cuda::aligned(pages) &&
                         cuda::is_hopper(q.device()) &&
                         gpu::mla_decode_supports(static_cast<int>(q.size(2)), static_cast<int>(rank),
                                                  static_cast<int>(pages.size(1)));
  if (!supported) return ref::mla_decode({q, pages, table.to(at::kCPU), lengths, rank, scale, window});
  const auto there = [&](const Tensor& t) {
    return t.is_cuda() ? t.contiguous() : cuda::to_device(t, q.device());
  };
  const Tensor query = cuda::dense(q), index = there(table), length = there(lengths);
  Tensor o = at::empty({q.size(0), q.size(1), rank}, q.options());
  gpu::MlaDecodeParams p{.q = cuda::pointer(query),
                         .pages = cuda::pointer(pages),
                         .table = cuda::pointer_as<int32_t>(index),
                         .lengths = cuda::pointer_as<int64_t>(length),
                         .table_stride = index.size(1),
                         .N = static_cast<int>(q.size(0)),
                         .H = static_cast<int>(q.size(1)),
                         .D = static_cast<int>(q.size(2)),
                         .rank = static_cast<int>(rank),
                         .window = window,
                         .scale = static_cast<float>(scale),
                         .o = cuda::pointer(o),
                         .workspace = nullptr,
                         .stream = c10::cuda::getCurrentCUDAStream()};
  const Tensor space = cuda::workspace(gpu::mla_decode_workspace_bytes(p), q.device());
  p.workspace = cuda::pointer(space);
  cuda::check_launch("mla_decode", gpu::mla_decode(p));
  return o;
}

}  // namespace

TORCH_LIBRARY_IMPL(godwit, CUDA, m) {
  m.impl("mla_decode_fwd", fwd_cuda);
}

}  // namespace godwit::ops
