// CUDA registration of linear layers of few rows, and of those with int8 weights: the Hopper kernels for bf16
// rows. Many rows take a library's product, with int8 weights unpacked for it; so does what the kernels do
// not take.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "godwit/kernels/linear_rows_cuda.h"
#include "godwit/ops/cuda/launch.h"
#include "godwit/ops/ref/quantized_ref.h"

namespace godwit::ops {
namespace {

namespace gpu = kernels::cuda;
using at::Tensor;

// One matrix of a library's product.
Tensor by_library(const Tensor& x, const Tensor& w, const Tensor* scale) {
  if (scale == nullptr) return at::linear(x, w);
  const int64_t in = w.size(1), out = w.size(0);
  if (x.scalar_type() != at::kBFloat16 || !gpu::linear_rows_takes(in, out) || !cuda::is_hopper(x.device()))
    return at::linear(x, ref::dequantize_int8(w, *scale).to(x.scalar_type()));
  const Tensor values = cuda::dense(w), scales = cuda::dense(*scale);
  const Tensor unpacked = at::empty({out, in}, x.options());
  cuda::check_launch("linear_int8", gpu::unpack_int8({.in = in,
                                                      .out = out,
                                                      .w = cuda::pointer_as<int8_t>(values),
                                                      .scale = cuda::pointer_as<float>(scales),
                                                      .y = cuda::pointer(unpacked),
                                                      .stream = c10::cuda::getCurrentCUDAStream()}));
  return at::linear(x, unpacked);
}

// y_i = x w_i^T, with int8 weights if there are scales.
std::vector<Tensor> each_cuda(const Tensor& x, at::TensorList weights, at::TensorList scales) {
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAGuard guard(x.device());
  const bool int8 = !scales.empty();
  const int64_t in = x.size(-1), rows = x.numel() / std::max<int64_t>(in, 1);
  bool takes = x.scalar_type() == at::kBFloat16 &&
               static_cast<int>(weights.size()) <= gpu::LinearRowsParams::kMost &&
               cuda::is_hopper(x.device());
  int64_t out = 0;
  for (const Tensor& w : weights) {
    takes = takes && gpu::linear_rows_takes(in, w.size(0));
    out += w.size(0);
  }
  takes = takes && rows <= gpu::linear_rows_most(in, out, int8);
  std::vector<Tensor> y;
  if (!takes) {
    for (size_t i = 0; i < weights.size(); ++i)
      y.push_back(by_library(x, weights[i], int8 ? &scales[i] : nullptr));
    return y;
  }
  gpu::LinearRowsParams p;
  const Tensor dense_x = cuda::dense(x);
  p.rows = rows, p.in = in, p.count = static_cast<int>(weights.size()), p.int8 = int8;
  p.x = cuda::pointer(dense_x), p.stream = c10::cuda::getCurrentCUDAStream();
  std::vector<Tensor> keep;
  const auto kept = [&](const Tensor& t) {
    keep.push_back(cuda::dense(t));
    return cuda::pointer(keep.back());
  };
  for (size_t i = 0; i < weights.size(); ++i) {
    auto sizes = x.sizes().vec();
    sizes.back() = p.out[i] = weights[i].size(0);
    y.push_back(at::empty(sizes, x.options()));
    p.w[i] = kept(weights[i]), p.y[i] = cuda::pointer(y.back());
    if (int8) p.scale[i] = static_cast<const float*>(kept(scales[i]));
  }
  cuda::check_launch("linear_each", gpu::linear_rows(p));
  return y;
}

Tensor int8_cuda(const Tensor& x, const Tensor& values, const Tensor& scale) {
  return each_cuda(x, values, scale)[0];
}

}  // namespace

TORCH_LIBRARY_IMPL(godwit, CUDA, m) {
  m.impl("linear_int8_fwd", int8_cuda);
  m.impl("linear_each_fwd", each_cuda);
}

}  // namespace godwit::ops
