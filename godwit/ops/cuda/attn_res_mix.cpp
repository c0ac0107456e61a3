// CUDA registration of the Attention Residuals mix: the Hopper kernels for up to nine bf16 sources of up to
// 7,168 channels; everything else takes the plain composition.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "godwit/kernels/layer_gpu.h"
#include "godwit/ops/autograd_util.h"
#include "godwit/ops/cuda/launch.h"
#include "godwit/ops/ref/attn_res_mix_ref.h"

namespace godwit::ops {
namespace {

namespace gpu = kernels::cuda;
using at::Tensor;

bool has_kernel(at::TensorList sources, const Tensor& norm_weight, const Tensor& query) {
  const int64_t width = sources[0].size(1);
  const bool fits =
      sources.size() <= gpu::kMixMaxSources && width > 0 && width % 8 == 0 && width <= gpu::kMixMaxWidth;
  return fits && sources[0].scalar_type() == at::kBFloat16 && cuda::is_weight(norm_weight) &&
         cuda::is_weight(query) && cuda::is_hopper(sources[0].device());
}

// The kernels' view of the arguments, and the tensors that keep it alive.
struct Inputs {
  std::vector<Tensor> sources;
  Tensor norm_weight, query;
  gpu::MixParams raw;

  Inputs(at::TensorList list, const Tensor& norm_in, const Tensor& query_in, double eps)
      : norm_weight(norm_in.contiguous()), query(query_in.contiguous()) {
    for (const Tensor& x : list) {
      sources.push_back(cuda::dense(x));
      raw.v[sources.size() - 1] = cuda::pointer(sources.back());
    }
    raw.sources = static_cast<int>(list.size());
    raw.tokens = list[0].size(0);
    raw.width = static_cast<int>(list[0].size(1));
    raw.norm_weight = cuda::weight_vector(norm_weight), raw.query = cuda::weight_vector(query);
    raw.eps = static_cast<float>(eps);
    raw.stream = c10::cuda::getCurrentCUDAStream();
  }
};

Tensor fwd_cuda(at::TensorList sources, const Tensor& norm_weight, const Tensor& query, double eps) {
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAGuard guard(sources[0].device());
  if (!has_kernel(sources, norm_weight, query)) return ref::attn_res_mix(sources, norm_weight, query, eps);
  Inputs in(sources, norm_weight, query, eps);
  const Tensor out = at::empty(sources[0].sizes(), sources[0].options());
  in.raw.out = cuda::pointer(out);
  if (in.raw.tokens > 0) cuda::check_launch("attn_res_mix", gpu::attn_res_mix_fwd(in.raw));
  return out;
}

std::tuple<std::vector<Tensor>, Tensor, Tensor> bwd_composition(const Tensor& d_out, at::TensorList sources,
                                                                const Tensor& norm_weight,
                                                                const Tensor& query, double eps) {
  torch::autograd::variable_list inputs = sources.vec();
  inputs.push_back(norm_weight);
  inputs.push_back(query);
  const size_t count = sources.size();
  auto grads = composition_grads(inputs, {d_out}, [&](const torch::autograd::variable_list& x) {
    return torch::autograd::variable_list{
        ref::attn_res_mix(at::TensorList(x.data(), count), x[count], x[count + 1], eps)};
  });
  const Tensor d_norm = grads[count], d_query = grads[count + 1];
  grads.resize(count);
  return {grads, d_norm, d_query};
}

std::tuple<std::vector<Tensor>, Tensor, Tensor> bwd_cuda(const Tensor& d_out, at::TensorList sources,
                                                         const Tensor& norm_weight, const Tensor& query,
                                                         double eps) {
  const c10::cuda::CUDAGuard guard(d_out.device());
  if (!has_kernel(sources, norm_weight, query))
    return bwd_composition(d_out, sources, norm_weight, query, eps);
  const at::NoGradGuard no_grad;
  Inputs in(sources, norm_weight, query, eps);
  const Tensor d = cuda::dense(d_out.to(at::kBFloat16));
  const Tensor d_norm = at::zeros(norm_weight.sizes(), norm_weight.options()),
               d_query = at::zeros(query.sizes(), query.options());
  std::vector<Tensor> d_sources;
  for (size_t s = 0; s < sources.size(); ++s) {
    d_sources.push_back(at::empty(d.sizes(), d.options()));
    in.raw.d_v[s] = cuda::pointer(d_sources.back());
  }
  if (in.raw.tokens == 0) return {d_sources, d_norm, d_query};
  const Tensor space = cuda::workspace(gpu::attn_res_mix_bwd_workspace_bytes(in.raw), d.device());
  in.raw.d_out = cuda::pointer(d), in.raw.workspace = cuda::pointer(space);
  in.raw.d_norm_weight = cuda::weight_gradient(d_norm), in.raw.d_query = cuda::weight_gradient(d_query);
  cuda::check_launch("attn_res_mix backward", gpu::attn_res_mix_bwd(in.raw));
  return {d_sources, d_norm, d_query};
}

}  // namespace

TORCH_LIBRARY_IMPL(godwit, CUDA, m) {
  m.impl("attn_res_mix_fwd", fwd_cuda);
  m.impl("attn_res_mix_bwd", bwd_cuda);
}

}  // namespace godwit::ops
