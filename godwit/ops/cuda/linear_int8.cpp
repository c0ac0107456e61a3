// CUDA registration of linear layers with int8 weights: the Hopper kernels for bf16 rows. Many rows take a
// library's product with weights that are unpacked for it; so does what the kernels do not take.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "godwit/kernels/linear_int8_cuda.h"
#include "godwit/ops/cuda/launch.h"
#include "godwit/ops/ref/quantized_ref.h"

namespace godwit::ops {
namespace {

namespace gpu = kernels::cuda;
using at::Tensor;

Tensor forward_cuda(const Tensor& x, const Tensor& values, const Tensor& scale) {
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAGuard guard(x.device());
  const int64_t in = values.size(1), out = values.size(0);
  if (x.scalar_type() != at::kBFloat16 || !gpu::linear_int8_takes(in, out) || !cuda::is_hopper(x.device())) {
    return at::linear(x, ref::dequantize_int8(values, scale).to(x.scalar_type()));
  }
  const Tensor rows = cuda::dense(x), w = cuda::dense(values), s = cuda::dense(scale);
  gpu::LinearInt8Params p{.rows = rows.numel() / in,
                          .in = in,
                          .out = out,
                          .w = cuda::pointer_as<int8_t>(w),
                          .scale = cuda::pointer_as<float>(s),
                          .x = cuda::pointer(rows),
                          .stream = c10::cuda::getCurrentCUDAStream()};
  if (p.rows > gpu::linear_int8_most_rows()) {
    const Tensor unpacked = at::empty({out, in}, x.options());
    p.y = cuda::pointer(unpacked);
    cuda::check_launch("linear_int8", gpu::unpack_int8(p));
    return at::linear(x, unpacked);
  }
  auto sizes = x.sizes().vec();
  sizes.back() = out;
  const Tensor y = at::empty(sizes, x.options());
  p.y = cuda::pointer(y);
  cuda::check_launch("linear_int8", gpu::linear_int8(p));
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(godwit, CUDA, m) {
  m.impl("linear_int8_fwd", forward_cuda);
}

}  // namespace godwit::ops
