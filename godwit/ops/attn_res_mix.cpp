// attn_res_mix: checks, autograd and dispatch. Nothing but the inputs is kept for the backward.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "godwit/kernels/attn_res_mix.h"
#include "godwit/ops/arguments.h"
#include "godwit/ops/dispatch.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/attn_res_mix_ref.h"
#include "godwit/ops/traced.h"

namespace godwit::ops {
namespace {

void check_arguments(at::TensorList sources, const Tensor& norm_weight, const Tensor& query) {
  TORCH_CHECK(!sources.empty(), "attn_res_mix: sources: expected at least one tensor, got none");
  const Tensor& first = sources[0];
  check_float({"attn_res_mix", "sources[0]", first}, 2);
  for (const Tensor& source : sources) {
    check_like({"attn_res_mix", "sources", source}, {"attn_res_mix", "sources[0]", first});
    check_shape({"attn_res_mix", "sources", source}, first.sizes());
  }
  for (const Argument& vector :
       {Argument{"attn_res_mix", "norm_weight", norm_weight}, Argument{"attn_res_mix", "query", query}}) {
    check_float(vector, 1);
    check_shape(vector, {first.size(1)});
    check_device(vector, {"attn_res_mix", "sources[0]", first});
  }
}

// fp32 copies (or the tensors themselves) and the pointers to them.
struct Rows {
  explicit Rows(at::TensorList list) {
    for (const Tensor& x : list) {
      tensors.push_back(as_float(x));
      pointers.push_back(tensors.back().const_data_ptr<float>());
    }
  }
  std::vector<Tensor> tensors;
  std::vector<const float*> pointers;
};

Tensor fwd_cpu(at::TensorList sources, const Tensor& norm_weight, const Tensor& query, double eps) {
  const Rows v(sources);
  const Tensor key = as_float(norm_weight) * as_float(query);
  Tensor out = at::empty(sources[0].sizes(), key.options());
  kernels::attn_res_mix_fwd(out.size(0), {.sources = static_cast<int64_t>(sources.size()),
                                          .width = out.size(1),
                                          .eps = static_cast<float>(eps),
                                          .v = v.pointers.data(),
                                          .key = key.const_data_ptr<float>(),
                                          .out = out.mutable_data_ptr<float>()});
  return out.to(sources[0].scalar_type());
}

// Gradients of the sources, norm_weight and query.
std::tuple<std::vector<Tensor>, Tensor, Tensor> bwd_cpu(const Tensor& d_out, at::TensorList sources,
                                                        const Tensor& norm_weight, const Tensor& query,
                                                        double eps) {
  const Rows v(sources);
  const Tensor weight = as_float(norm_weight), q = as_float(query), key = weight * q, d = as_float(d_out);
  std::vector<Tensor> d_v;
  std::vector<float*> d_pointers;
  for (const Tensor& source : v.tensors) {
    d_v.push_back(at::empty(source.sizes(), source.options()));
    d_pointers.push_back(d_v.back().mutable_data_ptr<float>());
  }
  Tensor d_key = at::empty_like(key);
  kernels::attn_res_mix_bwd(d.size(0), {.sources = static_cast<int64_t>(sources.size()),
                                        .width = d.size(1),
                                        .eps = static_cast<float>(eps),
                                        .v = v.pointers.data(),
                                        .key = key.const_data_ptr<float>(),
                                        .d_out = d.const_data_ptr<float>(),
                                        .d_v = d_pointers.data(),
                                        .d_key = d_key.mutable_data_ptr<float>()});
  for (Tensor& x : d_v) x = x.to(sources[0].scalar_type());
  return {d_v, (d_key * q).to(norm_weight.scalar_type()), (d_key * weight).to(query.scalar_type())};
}

Tensor fwd_meta(at::TensorList sources, const Tensor& /*norm_weight*/, const Tensor& /*query*/,
                double /*eps*/) {
  return meta_like(sources[0]);
}

std::tuple<std::vector<Tensor>, Tensor, Tensor> bwd_meta(const Tensor& /*d_out*/, at::TensorList sources,
                                                         const Tensor& norm_weight, const Tensor& query,
                                                         double /*eps*/) {
  std::vector<Tensor> d_sources;
  for (const Tensor& source : sources) d_sources.push_back(meta_like(source));
  return {d_sources, meta_like(norm_weight), meta_like(query)};
}

using Fwd = decltype(fwd_cpu);
using Bwd = decltype(bwd_cpu);

class Mix : public torch::autograd::Function<Mix> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* ctx, at::TensorList sources,
                        const Tensor& norm_weight, const Tensor& query, double eps) {
    const at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = typed_op<Fwd>("godwit::attn_res_mix_fwd");
    torch::autograd::variable_list saved = sources.vec();
    saved.push_back(norm_weight);
    saved.push_back(query);
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["eps"] = eps;
    return op.call(sources, norm_weight, query, eps);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    static const auto op = typed_op<Bwd>("godwit::attn_res_mix_bwd");
    const auto saved = ctx->get_saved_variables();
    const size_t count = saved.size() - 2;
    auto [d_sources, d_norm_weight, d_query] =
        op.call(grads[0], at::TensorList(saved.data(), count), saved[count], saved[count + 1],
                ctx->saved_data["eps"].toDouble());
    torch::autograd::variable_list out = std::move(d_sources);
    out.push_back(d_norm_weight);
    out.push_back(d_query);
    out.emplace_back();
    return out;
  }
};

bool any_needs_grad(at::TensorList sources) {
  return std::any_of(sources.begin(), sources.end(), [](const Tensor& x) { return needs_grad(x); });
}

Tensor mix_composite(at::TensorList sources, const Tensor& norm_weight, const Tensor& query, double eps) {
  if (sources.empty() || !is_dataless(sources[0])) check_arguments(sources, norm_weight, query);
  static const auto op = typed_op<Fwd>("godwit::attn_res_mix_fwd");
  if (!has_kernel(op, sources[0])) return ref::attn_res_mix(sources, norm_weight, query, eps);
  if (needs_grad(norm_weight, query) || any_needs_grad(sources))
    return Mix::apply(sources, norm_weight, query, eps);
  return op.call(sources, norm_weight, query, eps);
}

TORCH_LIBRARY_FRAGMENT(godwit, m) {
  m.def("attn_res_mix(Tensor[] sources, Tensor norm_weight, Tensor query, float eps) -> Tensor");
  m.def("attn_res_mix_fwd(Tensor[] sources, Tensor norm_weight, Tensor query, float eps) -> Tensor");
  m.def(
      "attn_res_mix_bwd(Tensor d_out, Tensor[] sources, Tensor norm_weight, Tensor query, float eps) -> "
      "(Tensor[] d_sources, Tensor d_norm_weight, Tensor d_query)");
}
TORCH_LIBRARY_IMPL(godwit, CompositeImplicitAutograd, m) {
  m.impl("attn_res_mix", mix_composite);
}
TORCH_LIBRARY_IMPL(godwit, CPU, m) {
  m.impl("attn_res_mix_fwd", fwd_cpu);
  m.impl("attn_res_mix_bwd", bwd_cpu);
}
TORCH_LIBRARY_IMPL(godwit, Meta, m) {
  m.impl("attn_res_mix_fwd", fwd_meta);
  m.impl("attn_res_mix_bwd", bwd_meta);
}

}  // namespace

Tensor attn_res_mix(const std::vector<Tensor>& sources, const Tensor& norm_weight, const Tensor& query,
                    double eps) {
  static const auto op = typed_op<decltype(mix_composite)>("godwit::attn_res_mix");
  return op.call(sources, norm_weight, query, eps);
}

}  // namespace godwit::ops
